"""A live server over engine cores of this process, whose device computes integers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from rootgraft.engine.serving.async_engine import AsyncEngine
from rootgraft.engine.text.tokenizer import Tokenizer
from support.api.api_live import Live
from support.machine.waits import HANG_SECONDS
from support.models.tiny_tokenizers import train_byte_level, write_folder

CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def tokenizer_folder(folder: Path) -> tuple[Path, int]:
    """Write a tokenizer. Returns its folder and the size of its vocabulary."""
    written = write_folder(folder, train_byte_level().to_str(), chat_template=CHAT)
    return written, len(json.loads((written / "tokenizer.json").read_text())["model"]["vocab"])


def in_loop(live: Live, work: Any) -> Any:
    """Run a coroutine in the server's loop."""
    return asyncio.run_coroutine_threadsafe(work, live.loop).result(HANG_SECONDS)


def put_engine(live: Live, client: Any, folder: Path) -> None:
    """Start a client's engine and put it in the place of the server's; whoever calls closes it."""
    ready = in_loop(live, client.start())
    engine = live.state.engine
    engine.client, engine.async_engine = client, AsyncEngine(client, Tokenizer.load(folder), ready)
