"""A start where no folder can be written: home, cache, temporary files and the working directory are read-only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.api.real_server import RealServer, free_port
from support.engine.tiny_llm import CHAT_TEMPLATE
from support.models.tiny_models import COMMON
from support.models.tiny_tokenizers import train_byte_level, write_folder
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.heavy


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read-only"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    size = train_byte_level().get_vocab_size()
    config = LlamaConfig(**COMMON | {"vocab_size": size, "max_position_embeddings": 512})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    write_folder(tmp_path / "tiny", train_byte_level().to_str(), **special)
    return tmp_path / "tiny"


def test_a_server_starts_and_answers(read_only: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A free answer and one of a schema, whose compile worker is a process of its own."""
    for name in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "RUNTIME_DIRECTORY", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(read_only))
    options = ("--model", str(model), "--dtype", "float32", "--device", "cpu", "--num-gpu-blocks-override", "200")
    server = RealServer(free_port(), *options, cwd=read_only)
    try:
        server.wait_ready()
        said = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert said.status_code == 200 and said.json()["usage"]["completion_tokens"] == 3
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "boolean"}}}
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "response_format": form}
        chat = server.http.post("/v1/chat/completions", json=body)
        assert chat.json()["choices"][0]["message"]["content"] in ("true", "false")
    finally:
        server.close()
    assert not os.listdir(read_only)
