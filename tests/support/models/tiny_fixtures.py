"""One tiny byte-level tokenizer for all text tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootgraft.engine.text.tokenizer import Tokenizer
from support.models.tiny_tokenizers import train_byte_level, write_folder

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(
        tmp_path_factory.mktemp("tiny"),
        train_byte_level().to_str(),
        eos_token="<|im_end|>",
        bos_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.load(tiny_folder)
