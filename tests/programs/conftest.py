"""Programs over a live server with a fake engine, and over the offline class with the real core on integers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.api.api_live import Live, make_state, serve
from support.engine.fake_worker import FakeWorker
from support.models.tiny_tokenizers import train_byte_level, write_folder

from rootgraft import LLM
from rootgraft.engine.checkpoint.locate import ModelFiles
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.programs import Session

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def programs_live() -> Iterator[Live]:
    yield from serve(make_state())


@pytest.fixture
def live(programs_live: Live) -> Live:
    programs_live.reset()
    return programs_live


@pytest.fixture
def remote(live: Live) -> Iterator[Session]:
    with Session(f"{live.url}/v1") as session:
        yield session


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    folder = tmp_path_factory.mktemp("tiny")
    return write_folder(folder, train_byte_level().to_str(), **tokens, chat_template=TEMPLATE)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path) -> Iterator[Session]:
    """A session on the real scheduler, cache and tree; the device adds up integers."""
    worker = FakeWorker(400, 16, vocab_size=420, eos=tuple(Tokenizer.load(tokenizer_folder).eos_ids))
    monkeypatch.setattr(EngineCore, "load", lambda config, path: EngineCore(config, worker))
    monkeypatch.setattr(
        "rootgraft.engine.offline.offline_model.resolve_served_model",
        lambda config: ModelFiles(tokenizer_folder, "tiny"),
    )
    llm = LLM()
    with Session(llm) as session:
        yield session
    llm.close()
