"""The Open Inference Protocol over gRPC: metadata, inference in both forms of contents, streams, the repository."""

from __future__ import annotations

import json
import struct
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api.rpc_live import INFERENCE, RpcClient, rpc_of
from support.machine.thoroughness import repeats

from rootgraft.api.config import ServerConfig
from rootgraft.api.rpc.messages import message
from rootgraft.engine.types import AdapterInfo


def call(rpc: RpcClient, name: str, request: Any = None, **options: Any) -> Any:
    asked = message(f"inference.{name}Request")(**(request or {}))
    return rpc.unary(f"{INFERENCE}/{name}", asked, f"inference.{name}Response", **options)


def tensor(name: str, datatype: str, *values: Any) -> dict[str, Any]:
    field = {"BYTES": "bytes_contents", "BOOL": "bool_contents"}[datatype]
    return {"name": name, "datatype": datatype, "shape": [len(values)], "contents": {field: values}}


def asked(*texts: str, options: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    inputs = [tensor("text_input", "BYTES", *(text.encode() for text in texts))]
    if options is not None:
        inputs.append(tensor("sampling_parameters", "BYTES", json.dumps(options).encode()))
    return {"model_name": "tiny", "id": "7", "inputs": inputs, **fields}


def status(error: Any) -> Any:
    return error.value.code()


def test_health_and_metadata(rpc: RpcClient) -> None:
    assert call(rpc, "ServerLive").live and call(rpc, "ServerReady").ready
    assert call(rpc, "ModelReady", {"name": "tiny"}).ready
    server = call(rpc, "ServerMetadata")
    assert (server.name, server.version) == ("rootgraft", "1.2.3") and "model_repository" in server.extensions
    model = call(rpc, "ModelMetadata", {"name": "tiny"})
    assert [each.name for each in model.inputs][:2] == ["text_input", "stream"] and model.outputs[0].datatype == "BYTES"
    rpc.live.state.engine.draining = True
    assert call(rpc, "ServerLive").live and not call(rpc, "ServerReady").ready
    assert not call(rpc, "ModelReady", {"name": "tiny"}).ready
    for name in ("ModelReady", "ModelMetadata"):
        with pytest.raises(grpc.RpcError) as caught:
            call(rpc, name, {"name": "no/such"})
        assert status(caught) is grpc.StatusCode.NOT_FOUND


def test_inference(rpc: RpcClient) -> None:
    answer = call(rpc, "ModelInfer", asked("hi", "ho", options={"max_tokens": 3, "temperature": 0.5}))
    assert (answer.model_name, answer.id) == ("tiny", "7")
    (output,) = answer.outputs
    assert (output.name, list(output.shape), list(output.contents.bytes_contents)) == ("text_output", [2], [b"ans"] * 2)
    params = rpc.live.async_engine.seen[-1].params
    assert (params.max_tokens, params.temperature) == (3, 0.5)
    wanted = [{"name": name} for name in ("num_output_tokens", "finish_reason", "num_input_tokens")]
    answer = call(rpc, "ModelInfer", asked("hi", options={"max_tokens": 3}, outputs=wanted))
    assert list(answer.outputs[0].contents.uint_contents) == [3] and list(answer.outputs[2].contents.uint_contents) == [
        3
    ]
    assert answer.outputs[1].contents.bytes_contents[0] == b"length"


def test_options_as_parameters_of_the_request(rpc: RpcClient) -> None:
    parameters = {
        "max_tokens": {"int64_param": 2},
        "temperature": {"double_param": 0.5},
        "priority": {"uint64_param": 0},
    }
    answer = call(rpc, "ModelInfer", asked("hi", parameters=parameters))
    assert (
        answer.outputs[0].contents.bytes_contents[0] == b"an"
        and rpc.live.async_engine.seen[-1].params.temperature == 0.5
    )


def test_raw_contents(rpc: RpcClient) -> None:
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [2]},
        {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1]},
    ]
    raw = [b"\x02\0\0\0hi\x02\0\0\0ho", b"\x00"]
    answer = call(rpc, "ModelInfer", {"model_name": "tiny", "inputs": inputs, "raw_input_contents": raw})
    assert answer.raw_output_contents == [
        b"".join(struct.pack("<I", 10) + text + b"answer 0" for text in (b"hi", b"ho"))
    ]
    assert not answer.outputs[0].HasField("contents")


def test_streams(rpc: RpcClient) -> None:
    kind = message("inference.ModelInferRequest")
    streamed = asked("hi")
    streamed["inputs"] = [*streamed["inputs"], tensor("stream", "BOOL", True)]
    wrong = {**streamed, "model_name": "nope"}
    requests = iter([kind(**streamed), kind(**wrong), kind(**asked("ho"))])
    found = list(rpc.both(f"{INFERENCE}/ModelStreamInfer", requests, "inference.ModelStreamInferResponse"))
    texts = [each.infer_response.outputs[0].contents.bytes_contents[0] for each in found if not each.error_message]
    assert b"".join(texts[:-1]) == b"answer 0" and texts[-1] == b"answer 0"
    errors = [each for each in found if each.error_message]
    assert len(errors) == 1 and "nope" in errors[0].error_message and errors[0].infer_response.id == "7"
    finals = [
        each.infer_response.parameters["triton_final_response"].bool_param for each in found if not each.error_message
    ]
    assert sum(finals) == 2 and finals[-1]


def test_the_repository(rpc: RpcClient) -> None:
    rpc.live.client.adapters["sql"] = AdapterInfo("sql", "adapters/sql", "ready", "host")
    models = call(rpc, "RepositoryIndex").models
    assert [(each.name, each.state) for each in models] == [(name, "READY") for name in ("tiny", "org/alias", "sql")]
    with pytest.raises(grpc.RpcError) as caught:
        call(rpc, "RepositoryModelLoad", {"model_name": "x", "parameters": {"lora_path": {"string_param": "y"}}})
    assert status(caught) is grpc.StatusCode.INVALID_ARGUMENT and "--lora-dir" in caught.value.details()
    with pytest.raises(grpc.RpcError) as caught:
        call(rpc, "RepositoryModelUnload", {"model_name": "tiny"})
    assert status(caught) is grpc.StatusCode.INVALID_ARGUMENT and "base model" in caught.value.details()


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"model_name": "tiny"}, "inputs"),
        ({"model_name": "tiny", "inputs": [tensor("words", "BYTES", b"x")]}, "inputs[0].name"),
        ({"model_name": "tiny", "inputs": [tensor("stream", "BOOL", False)]}, "text_input"),
        ({"model_name": "tiny", "inputs": [tensor("text_input", "BOOL", True)]}, "inputs[0].datatype"),
        ({"model_name": "tiny", "inputs": [tensor("text_input", "BYTES", b"\xff")]}, "UTF-8"),
        ({"model_name": "tiny", "inputs": [{**tensor("text_input", "BYTES", b"x"), "shape": [2]}]}, "inputs[0].data"),
        ({"model_name": "tiny", "inputs": [{**tensor("text_input", "BYTES"), "shape": [65]}]}, "inputs[0].shape"),
        (asked("x", options={"warmth": 1}), "warmth"),
        (asked("x", options={"stream": True}), "stream"),
        (asked("x", outputs=[{"name": "nope"}]), "outputs[0].name"),
        ({**asked("x"), "raw_input_contents": [b"abc"]}, "raw_input_contents"),
        ({**asked("x"), "model_name": ""}, "named"),
        ({**asked("x"), "parameters": {"temperature": {"double_param": float("nan")}}}, "temperature"),
        ({**asked("x"), "parameters": {"top_p": {"double_param": float("inf")}}}, "top_p"),
    ],
)
def test_malformed_requests(rpc: RpcClient, request_: dict[str, Any], text: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(rpc, "ModelInfer", request_)
    assert status(caught) is grpc.StatusCode.INVALID_ARGUMENT and text in caught.value.details(), caught.value.details()
    assert not rpc.live.async_engine.seen


def test_any_bytes_are_refused_or_served(rpc: RpcClient) -> None:
    """Bytes that are no message, raw texts whose lengths lie, and mutated requests: never an internal error."""
    good = message("inference.ModelInferRequest")(**asked("hi", options={"max_tokens": 2})).SerializeToString()
    fine = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)

    @settings(max_examples=repeats(60), deadline=None)
    @given(data=st.one_of(st.binary(max_size=40), st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255))))
    def run(data: Any) -> None:
        if isinstance(data, tuple):
            at, value = data
            data = good[:at] + bytes([value]) + good[at + 1 :]
        try:
            rpc.unary(f"{INFERENCE}/ModelInfer", data, "inference.ModelInferResponse")
        except grpc.RpcError as error:
            assert error.code() in fine, error

    run()


def test_the_same_over_http(rpc: RpcClient) -> None:
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]
    with rpc.live.http() as http:
        assert http.get("/v2/health/live").json() == {"live": True}
        assert http.get("/v2/health/ready").json() == {"ready": True}
        assert http.get("/v2").json()["name"] == "rootgraft" and http.get("/v2/models/tiny/ready").status_code == 200
        answer = http.post("/v2/models/tiny/infer", json={"inputs": inputs, "parameters": {"max_tokens": 2}}).json()
        assert answer["outputs"] == [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["an"]}]
        error = http.post("/v2/models/tiny/infer", json={"inputs": []}).json()
        assert isinstance(error["error"], str) and error["param"] == "inputs"
        assert http.post("/v2/repository/index", json={}).json()[0]["name"] == "tiny"


def test_loads_need_the_scope_admin(serve_with: Any) -> None:
    live = serve_with(ServerConfig(api_key=("right",)))
    with rpc_of(live) as rpc:
        with pytest.raises(grpc.RpcError) as caught:
            call(rpc, "ModelInfer", asked("hi"))
        assert status(caught) is grpc.StatusCode.UNAUTHENTICATED
        assert call(rpc, "ServerReady").ready, "a probe needs no key"
