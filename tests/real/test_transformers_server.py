"""The whole server over a model of the transformers library, with OpenAI's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.api.real_server import RealServer, free_port
from support.models.library_models import make_library_adapter, save_library_model
from support.models.tiny_tokenizers import train_byte_level, write_folder

pytestmark = pytest.mark.heavy
NAME, WORDS = "GPT2LMHeadModel", 440
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def test_a_schema_and_an_adapter(tmp_path: Path) -> None:
    model = save_library_model(NAME, tmp_path / "model", WORDS)
    write_folder(model, train_byte_level().to_str(), eos_token="<|im_end|>", chat_template=TEMPLATE)
    adapter = make_library_adapter(NAME, tmp_path / "adapter", 3, WORDS)
    options = "--device cpu --dtype float32 --threads 1 --num-gpu-blocks-override 60 --enable-lora"
    options += " --model-impl transformers --model"
    running = RealServer(free_port(), *options.split(), str(model), "--lora-modules", f"tuned={adapter}")
    try:
        running.wait_ready()
        texts = {
            name: running.client.completions.create(
                model=name, prompt="the fox", max_tokens=8, temperature=0, logprobs=0
            )
            for name in ("small", "tuned")
        }
        first, second = (each.choices[0].logprobs for each in texts.values())
        assert first is not None and second is not None and first.token_logprobs != second.token_logprobs
        schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        answer = running.client.chat.completions.create(
            model="tuned", messages=[{"role": "user", "content": "the fox"}], max_tokens=80, response_format=wanted
        )
        assert json.loads(answer.choices[0].message.content or "")["n"] in (1, 22)
    finally:
        running.close()
