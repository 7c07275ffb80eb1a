"""Where the system gives no memory, the request that needs it fails, and is answered when it is asked again."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from support.models.lora_folders import file_of, good_config, good_tensors, small_reader, write_folder

from rootgraft.engine.core import structured_output
from rootgraft.engine.core.structured_output import StructuredOutputManager
from rootgraft.engine.errors import CapacityError
from rootgraft.engine.messages import TokenTexts
from rootgraft.lora import read_adapter
from rootgraft.lora.adapter_pool import AdapterPool, LoadResult
from rootgraft.lora.errors import AdapterLimit

TEXTS = TokenTexts([1] * 95 + [5], bytes(range(32, 127)) + b"<eos>", (95,))


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def compiled(manager: StructuredOutputManager) -> Any:
    compilation = manager.compile(("regex", b"[ab]"), None)
    while (found := compilation.poll()) is None:
        pass
    return found


def test_a_vocabulary_without_memory_is_built_for_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(structured_output.resources, "check_room", refuse)
        manager = StructuredOutputManager(TEXTS, (95,), 96, 8)
        found = compiled(manager)
        assert isinstance(found, CapacityError) and "try again" in str(found)
    assert not isinstance(compiled(manager), Exception)
    manager.close()


def loaded(pool: AdapterPool) -> LoadResult:
    pool.load("a", "a")
    while not (results := pool.poll()):
        pass
    return results[0]


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't allocate memory")]
)
def test_an_adapter_without_memory_is_loaded_for_the_next_request(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    write_folder(tmp_path / "a", good_config(), file_of(good_tensors(0)))
    pool = AdapterPool(small_reader(tmp_path), max_loras=2, max_adapters=2, max_cpu_bytes=8000, patience=8)
    with monkeypatch.context() as patch:
        patch.setattr(read_adapter, "read_tensors", fail)
        result = loaded(pool)
        assert isinstance(result.error, AdapterLimit) and "try again" in str(result.error)
    assert loaded(pool).version is not None
    pool.close()
