# ruff: noqa: E501 (messages)
"""Errors of a start end with the command that mends them: hub, disk, torch, memory, device, compiler."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

from rootgraft.api.cli import serve_command
from rootgraft.api.cli.main import main
from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core import engine_process
from rootgraft.engine.errors import ConfigError, EngineDead, EngineError, ModelError
from rootgraft.engine.executor import device, kv_budget, load_weights, make_runner, worker, worker_summary
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.serving.engine_spawn import fault_of_start
from rootgraft.engine.text.tokenizer import Tokenizer


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, str]]]:
    """A hub on the loopback that answers with a status and a code of errors, by the name of the model."""
    replies: dict[str, tuple[int, str]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = "/".join(self.path.split("/")[3:5])
            status, code = replies.get(name, (404, "RepoNotFound"))
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", f"{code} of {name}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield replies
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("reply", "revision", "message"),
    [
        ((403, "GatedRepo"), None, "accept its terms at https://huggingface.co/org/name, .* Try: hf auth login$"),
        ((401, "RepoNotFound"), None, "the hub has no such model, or it is private. Try: hf auth login"),
        ((404, "RevisionNotFound"), "v9", "--revision: org/name has no branch, tag or commit v9. Try: rootgraft pull org/name"),
    ],
)  # fmt: skip
def test_what_the_hub_refuses(hub: Any, reply: tuple[int, str], revision: str | None, message: str) -> None:
    hub["org/name"] = reply
    with pytest.raises(ModelError, match=message):
        resolve_model("org/name", revision=revision)


def test_a_hub_that_cannot_be_reached(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelError, match=r"the hub cannot be reached: .* Try: rootgraft list"):
        resolve_model("org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set\. Try: env -u HF_HUB_OFFLINE rootgraft pull org/name"):
        resolve_model("org/name")


def test_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("download failed") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"disk of the hub's cache is full\. Try: rootgraft list, then rootgraft rm"):
        resolve_model("org/name")


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        ("raise ImportError('libtorch.so: not found', name='torch')", ConfigError, r"torch cannot be imported: libtorch\.so: not found\. Try: .* -m pip install --force-reinstall 'torch"),
        ("raise OSError('libcudart.so.13: cannot open')", ConfigError, r"torch cannot be imported: libcudart\.so\.13"),
        ("import os; os.kill(os.getpid(), 9)", EngineDead, r"it was killed, as the system does when memory runs out.* Try: rootgraft serve --quantization"),
        ("import os; os.kill(os.getpid(), 4)", EngineDead, r"by signal 4 \(SIGILL\); its lines above give the reason\. Try: rootgraft doctor"),
        ("import os; os._exit(3)", EngineDead, r"with exit status 3; .* Try: rootgraft doctor"),
    ],
)  # fmt: skip
def test_an_engine_whose_torch_does_not_run(
    program: str, error: type[EngineError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def start() -> None:
        client = EngineClient(EngineConfig(), tmp_path)
        try:
            await client.start()
        finally:
            await client.close()

    with pytest.raises(error, match=message):
        asyncio.run(start())


def no_memory(*_: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    "fault",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_a_model_beyond_the_memory(fault: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rootgraft.engine.core.engine_core import EngineCore

    def load(*_: object) -> None:
        raise fault

    monkeypatch.setattr(EngineCore, "load", load)
    with pytest.raises(ConfigError, match=r"does not fit into memory .* Try: rootgraft serve --quantization int8"):
        engine_process._load(EngineConfig(device="cpu"), tmp_path)
    with monkeypatch.context() as patch:  # not even torch can be imported
        patch.setattr(engine_process, "check_room", no_memory)
        with pytest.raises(ConfigError, match=r"does not fit into memory \(\[Errno 12\]"):
            engine_process._load(EngineConfig(device="cpu"), tmp_path)
    with pytest.raises(ConfigError, match=r"does not fit into memory .* other programs on the GPU") as caught:
        engine_process._load(EngineConfig(device="cuda"), tmp_path)
    assert "--quantization" not in str(caught.value), "a GPU refuses it"
    fault = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        engine_process._load(EngineConfig(), tmp_path)


@pytest.mark.parametrize(
    ("wanted", "num_pages", "message"),
    [
        (
            None,
            1,
            r"No memory is left for the KV pool: 1 pages of 16 tokens\. .* Try: rootgraft serve --kv-cache-memory",
        ),
        (200, 100, r"beyond the model's own limit, 128\. Try: rootgraft serve --max-model-len 128$"),
        (100, 5, r"the KV pool, which holds 63 tokens; .* Try: rootgraft serve --max-model-len 63$"),
    ],
)
def test_a_pool_that_is_too_small(wanted: int | None, num_pages: int, message: str) -> None:
    model: Any = SimpleNamespace(max_position_embeddings=128)
    with pytest.raises(ConfigError, match=message):
        kv_budget.longest_sequence(EngineConfig(max_model_len=wanted), model, num_pages)
    with pytest.raises(ConfigError) as caught:
        kv_budget.longest_sequence(EngineConfig(max_model_len=wanted), model, num_pages, on_gpu=True)
    assert "--quantization" not in str(caught.value), "a GPU refuses it"


def test_a_pool_that_the_system_does_not_give(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(make_runner, "KvPool", refuse)
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_memory=9999)
    with pytest.raises(
        ConfigError, match=r"refuses 9,9\d\d\.\d GiB for the KV pool: Cannot allocate memory\. Try: .*memory 4"
    ):
        worker.Worker(config, tiny_llama)


def test_a_pool_beyond_the_memory_is_told_before_the_port_is_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_command, "EnginePreload", None)  # no process is started
    assert main(["serve", "models/none", "--device", "cpu", "--kv-cache-memory", "99999"]) == 1
    told = capsys.readouterr().err
    assert re.search(r"--kv-cache-memory 99999 .* is more than the .* of memory .* Try: .* --kv-cache-memory \d", told)


def test_a_folder_of_adapters_that_is_not_there_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", dtype="float32", enable_lora=True, lora_dir=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--lora-dir must be a folder, which .*/none is not\."):
        worker.Worker(config, tiny_llama)


def test_a_tokenizer_that_is_not_there_is_named_by_its_option(tiny_llama: Path, tmp_path: Path) -> None:
    for name, reason in (("none", "No such file or directory"), ("empty", "must be a tokenizer.json")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=rf"--tokenizer: .*/{name} cannot be used: .*{reason}"):
            Tokenizer.load(tiny_llama, tokenizer_path=tmp_path / name)


def save_adapter(folder: Path, width: int) -> None:
    """Write an adapter of rank 3 for the queries of a Llama of this width."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": torch.zeros(3, width), f"{module}.lora_B.weight": torch.zeros(96, 3)}
    save_file(tensors, folder / "adapter_model.safetensors")


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no folder of adapters": ({"enable_lora": True, "lora_dir": "none"}, r"--lora-dir must be a folder, which none "),
    "no adapter": (
        {"enable_lora": True, "lora_modules": ("sql=none",)},
        r"--lora-modules sql=none: There is no folder at the adapter's path\. There is neither none\.",
    ),
    "a rank": (
        {"enable_lora": True, "lora_modules": ("sql=fitting",), "max_lora_rank": 1},
        r"--lora-modules sql=.*: model\.layers\.0\..* has rank 3; the limit is 1 \(--max-lora-rank\)\.",
    ),
    "another base": (
        {"enable_lora": True, "lora_modules": ("sql=wider",)},
        r"--lora-modules sql=.*: A of .* has shape \[3, 64\]; with the config's rank .* it must be \[3, 48\]\.",
    ),
    "a name": (
        {"enable_lora": True, "lora_modules": ("a b=fitting",)},
        r"--lora-modules a b=.*is not a name for an adapter",
    ),
    "length": ({"max_model_len": 9999}, r"--max-model-len 9999 is beyond the model's own limit, 512\. Try: "),
    "pool": (
        {"max_model_len": 100, "num_gpu_blocks_override": 5},
        r"does not fit into the KV pool, which holds 63 tokens",
    ),
    "no pool": ({"num_gpu_blocks_override": 2, "block_size": 1}, r"No memory is left for the KV pool: 2 pages"),
    "KV of 8 bits": ({"kv_cache_dtype": "int8", "block_size": 8}, r"needs a --block-size of a multiple of 16, not 8\."),
    "draft": ({"speculative_config": '{"model": "/none"}'}, r"The model of --speculative-config: there is no folder"),
    "module": ({"speculative_config": '{"method": "mtp"}'}, r"Method mtp of --speculative-config: MTP modules are "),
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_options_that_do_not_fit_the_model_are_told_before_its_weights_are_read(
    case: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server says in seconds must not wait until a large model has been loaded, nor in a fleet's template."""
    options, message = WRONG_OPTIONS[case]
    monkeypatch.setattr(load_weights, "load_by", lambda *_, **__: pytest.fail("weights are read"))
    monkeypatch.chdir(tmp_path)
    save_adapter(tmp_path / "fitting", 48)
    save_adapter(tmp_path / "wider", 64)
    config = EngineConfig(device="cpu", dtype="float32", threads=1, **options)
    for start in (lambda: worker.Worker(config, tiny_llama), lambda: load_weights.load_for_forks(config, tiny_llama)):
        with pytest.raises((ConfigError, ModelError), match=message):
            start()


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for built_for, reason in ((None, "this torch is built for CPUs"), ("13.0", "no CUDA device is visible")):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        with pytest.raises(
            ConfigError, match=rf"{reason}\. Use --device cpu to serve without a GPU\. Try: rootgraft doctor"
        ):
            device.choose_device(EngineConfig(device="cuda"))


def test_kernels_without_a_compiler_name_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "CPU kernels: plain torch, because no C++ compiler (g++ or c++) was found"
    monkeypatch.setattr(worker_summary.ops, "native_status", lambda: plain)
    assert worker_summary._kernel_status(torch.device("cpu")).startswith(f"{plain}. Try: ")
    monkeypatch.setattr(worker_summary.ops, "native_status", lambda: "CPU kernels: native, AVX2, 2 threads")
    assert "Try" not in worker_summary._kernel_status(torch.device("cpu"))


def test_a_package_that_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rootgraft.api.cli.main import main

    monkeypatch.setitem(sys.modules, "shtab", None)
    monkeypatch.delitem(sys.modules, "rootgraft.api.cli.completion", raising=False)
    assert main(["completion", "bash"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "the package shtab is missing. Try: pip install" in error


def test_advice_of_an_engine_that_the_system_killed_is_by_device() -> None:
    process: Any = SimpleNamespace(wait=lambda _seconds: -9)
    assert "Try: rootgraft serve --quantization" in fault_of_start(process)
    assert "--quantization" not in fault_of_start(process, on_gpu=True)
    assert "Try: rootgraft serve --max-cpu-loras" in fault_of_start(process, on_gpu=True)
