"""Triton's own client for gRPC, where it is installed: pip install tritonclient[grpc]"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.api.api_live import Live
from support.api.rpc_live import RpcClient, rpc_of
from support.machine.waits import HANG_SECONDS

triton = pytest.importorskip("tritonclient.grpc")
utils = pytest.importorskip("tritonclient.utils")


@pytest.fixture
def rpc(live: Live) -> Iterator[RpcClient]:
    with rpc_of(live) as client:
        yield client


def text_input(*texts: str) -> Any:
    tensor = triton.InferInput("text_input", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_))
    return tensor


def test_probes_metadata_and_answers(rpc: RpcClient) -> None:
    client = triton.InferenceServerClient(rpc.address)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("tiny")
    assert client.get_model_metadata("tiny").outputs[0].name == "text_output"
    assert client.get_model_repository_index().models[0].name == "tiny"
    answer = client.infer("tiny", [text_input("hi", "ho")], parameters={"max_tokens": 3})
    assert answer.as_numpy("text_output").tolist() == [b"ans", b"ans"]
    with pytest.raises(utils.InferenceServerException, match="none"):
        client.infer("none", [text_input("hi")])
    client.close()


def test_a_stream(rpc: RpcClient) -> None:
    client = triton.InferenceServerClient(rpc.address)
    found: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: found.put((result, error)))
    is_streamed = triton.InferInput("stream", [1], "BOOL")
    is_streamed.set_data_from_numpy(np.array([True]))
    client.async_stream_infer("tiny", [text_input("hi"), is_streamed], request_id="7")
    pieces = []
    while True:
        result, error = found.get(timeout=HANG_SECONDS)
        assert error is None, error
        pieces.append(result.as_numpy("text_output")[0])
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
    client.close()
    assert b"".join(pieces) == b"answer 0" and len(pieces) > 1
