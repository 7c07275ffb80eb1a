"""A log on a disk without space: requests are answered as ever, and the end of the engine still ends the server."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from support.api.real_server import RealServer, free_port
from support.api.small_disk import mounted
from support.engine.tiny_llm import CHAT_TEMPLATE
from support.machine.waits import HANG_SECONDS, wait_until
from support.models.tiny_models import COMMON
from support.models.tiny_tokenizers import train_byte_level, write_folder
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.heavy
ASK = {"prompt": "a", "max_tokens": 3}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    size = train_byte_level().get_vocab_size()
    config = LlamaConfig(**COMMON | {"vocab_size": size, "max_position_embeddings": 512})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    write_folder(tmp_path / "tiny", train_byte_level().to_str(), **special)
    return tmp_path / "tiny"


def test_a_log_on_a_full_disk(model: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 1 << 20) as disk:
        if disk is None:
            pytest.skip("this user may not mount a file system")
        log = disk.path / "log"
        with log.open("wb") as stderr:
            disk.fill()
            options = ("--model", str(model), "--dtype", "float32", "--device", "cpu", "--log-format", "json")
            pages = ("--num-gpu-blocks-override", "200")
            server = RealServer(free_port(), *options, *pages, stderr=stderr)
        try:
            server.wait_ready()
            for _ in range(50):  # more lines than a stream's buffer holds
                assert server.http.post("/v1/completions", json=ASK).status_code == 200
            assert log.stat().st_size == 0
            disk.free()
            said = server.http.post("/v1/completions", json=ASK)
            wait_until(lambda: said.headers["x-request-id"] in log.read_text())
            assert json.loads(log.read_text().splitlines()[-1])["level"] == "info"
            disk.fill()
            for child in psutil.Process(server.process.pid).children():
                child.kill()
            assert server.process.wait(HANG_SECONDS) == 70
        finally:
            server.close()
