"""Adapters over the client, in an engine process."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from dataclasses import replace

import pytest

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, EngineDead, RequestError, UnknownModel
from rootgraft.engine.messages import Done, Failed, LoadAdapter, Submit, TokenOut
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.types import SamplingParams

CONFIG = EngineConfig(dtype="float32", device="cpu", num_gpu_blocks_override=40, threads=1, enable_lora=True)


class Session:
    """A client and what its sequences got."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, asyncio.Future[Done | Failed]] = {}
        client.on_frame = self._frame

    async def ask(self, name: str | None, count: int = 5) -> list[int] | Failed:
        number = len(self.ends)
        self.tokens[number], self.ends[number] = [], asyncio.get_running_loop().create_future()
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.client.submit([Submit(number, array("i", [1, 2, 3]), params, name)])
        end = await self.ends[number]
        return end if isinstance(end, Failed) else self.tokens[number]

    def _frame(self, messages) -> None:
        for message in messages:
            if isinstance(message, TokenOut):
                self.tokens[message.id] += message.tokens
            elif isinstance(message, (Done, Failed)):
                self.ends[message.id].set_result(message)


async def test_load_use_replace_unload(adapted_llama):
    client = EngineClient(CONFIG, adapted_llama / "llama")
    session = Session(client)
    await client.start()
    assert await client.list_adapters() == () and not client.adapters
    await asyncio.gather(*(client.load_adapter(name, str(adapted_llama / name)) for name in ("twin_a", "twin_b")))
    plain, first, second = await asyncio.gather(*(session.ask(name) for name in (None, "twin_a", "twin_b")))
    assert plain != first != second != plain
    with pytest.raises(RequestError, match="already loaded"):
        await client.load_adapter("twin_a", str(adapted_llama / "twin_b"))
    await client.load_adapter("twin_a", str(adapted_llama / "twin_b"), replace=True)
    assert client.adapters["twin_a"].path == str(adapted_llama / "twin_b")
    assert await session.ask("twin_a") == second
    states = {info.name: info for info in await client.list_adapters()}
    assert states["twin_a"].requests == 2 and states["twin_b"].tier == "device" and states["twin_b"].rank == 4
    await client.unload_adapter("twin_a")
    assert client.adapters.keys() == {"twin_b"}
    failed = await session.ask("twin_a")
    assert isinstance(failed, Failed) and failed.kind == "UnknownModel"
    with pytest.raises(UnknownModel):
        await client.unload_adapter("twin_a")
    with pytest.raises(RequestError):
        await client.load_adapter("x", str(adapted_llama / "llama"))
    await client.close()
    assert client.process.returncode == 0


async def test_adapters_of_the_start_and_of_the_folder(adapted_llama):
    config = replace(CONFIG, lora_modules=("named=twin_a",), lora_dir=str(adapted_llama))
    client = EngineClient(config, adapted_llama / "llama")
    session = Session(client)
    ready = await client.start()
    assert [info.name for info in ready.adapters] == ["named"] == list(client.adapters)
    assert await session.ask("named") == await session.ask("twin_a")
    assert client.adapters.keys() == {"named", "twin_a"}
    with pytest.raises(RequestError, match="outside"):
        await client.load_adapter("x", "..")
    await client.close()


async def test_a_bad_adapter_stops_the_start(adapted_llama):
    client = EngineClient(replace(CONFIG, lora_modules=(f"bad={adapted_llama / 'llama'}",)), adapted_llama / "llama")
    with pytest.raises(ConfigError, match="--lora-modules bad="):
        await client.start()
    await client.close()


async def test_calls_end_with_the_engine(adapted_llama):
    client = EngineClient(CONFIG, adapted_llama / "llama")
    await client.start()
    os.kill(client.process.pid, signal.SIGSTOP)
    call = asyncio.create_task(client.load_adapter("twin_a", str(adapted_llama / "twin_a")))
    await asyncio.sleep(0)
    os.kill(client.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        await call
    await client.close()


async def test_the_engine_leaves_with_its_client_whatever_it_loads(adapted_llama):
    """More loads than are taken over before the client is gone: their thread must not keep the process."""
    client = EngineClient(CONFIG, adapted_llama / "llama")
    await client.start()
    client._send([LoadAdapter(number, f"n{number}", str(adapted_llama / "twin_a")) for number in range(1, 41)])
    while client._transport.get_write_buffer_size():
        await asyncio.sleep(0)
    client._transport.abort()
    assert await asyncio.to_thread(client.process.wait, 60) == 0
    await client.close()


async def test_closing_leaves_no_socket_open(adapted_llama):
    client = EngineClient(CONFIG, adapted_llama / "llama")
    await client.start()
    transport = client._transport
    call = asyncio.create_task(client.load_adapter("twin_a", str(adapted_llama / "twin_a")))
    await asyncio.sleep(0)
    await client.close()
    await asyncio.gather(call, return_exceptions=True)
    assert transport.is_closing() and not client.is_alive
