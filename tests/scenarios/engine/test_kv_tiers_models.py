"""KV that outlives its pool, in models that are computed: the same answers after a restart, from disk and from a file.

Bit-equal answers, of 8-bit KV too, are compared by the fuzzer (``test_fuzz.py``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine.core_hooks import core_of, tiers_of
from support.engine.tiny_llm import open_llm, write_adapter, write_model

from rootgraft import LLM, SamplingParams
from rootgraft.engine.errors import ConfigError, RequestError
from rootgraft.engine.kv_cache.block_codec import ALIGNMENT
from rootgraft.lora.request import LoRARequest

PROMPT = [random.Random(f"5 {each}").randrange(3, 250) for each in range(70)]
OTHER = [9, *PROMPT[1:]]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return write_adapter(root / "one", 1), write_adapter(root / "two", 2)


def ask(llm: LLM, prompt: list[int] | None = None, **named: Any) -> tuple[list[int], int]:
    """Return the answer's tokens, and how many tokens of the prompt were cached."""
    [output] = llm.generate([{"prompt_token_ids": prompt or PROMPT}], PARAMS, use_tqdm=False, **named)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


@pytest.fixture
def opened() -> Iterator[list[LLM]]:
    llms: list[LLM] = []
    yield llms
    for llm in llms:
        llm.close()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"block_size": 4},
        # Of ranks a page is the parts of all of them.
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "threads": 1}, marks=pytest.mark.heavy),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_restart_gives_the_same_answer_from_disk(
    model: Path, tmp_path: Path, opened: list[LLM], options: dict[str, Any]
) -> None:
    opened.append(open_llm(model, kv_disk=str(tmp_path), **options))
    cold, cached = ask(opened[0])
    assert cached == 0
    opened.pop().close()
    opened.append(open_llm(model, kv_disk=str(tmp_path), **options))
    size = options.get("block_size", 16)
    assert ask(opened[0]) == (cold, (len(PROMPT) - 1) // size * size)


@pytest.mark.parametrize(
    "other",
    [{"dtype": "bfloat16"}, pytest.param({"tensor_parallel_size": 2, "threads": 1}, marks=pytest.mark.heavy)],
    ids=["format", "ranks"],
)
def test_another_form_of_pages_finds_nothing(
    other: dict[str, Any], model: Path, tmp_path: Path, opened: list[LLM]
) -> None:
    """Another format of numbers, or parts of ranks."""
    for options in ({}, other):
        opened.append(open_llm(model, kv_disk=str(tmp_path), **options))
        assert ask(opened[-1])[1] == 0
        opened.pop().close()


def test_what_the_pool_has_lost_comes_back_from_disk(model: Path, tmp_path: Path, opened: list[LLM]) -> None:
    """A pool for one prompt, and two that are asked in turn."""
    options = {"num_gpu_blocks_override": 8, "max_model_len": 90, "kv_cache_memory": None}
    opened.append(open_llm(model, **options))
    opened.append(open_llm(model, kv_disk=str(tmp_path), **options))
    plain, tiered = opened
    for round_number in range(3):
        for prompt in (PROMPT, OTHER):
            told, _ = ask(plain, prompt)
            answer, cached = ask(tiered, prompt)
            assert answer == told
            assert cached == (64 if round_number else 0)
            tiers_of(core_of(tiered)).flush()


def test_a_prefix_in_a_file_is_cached_after_its_load(
    model: Path, adapters: tuple[Path, Path], tmp_path: Path, opened: list[LLM]
) -> None:
    opened.append(open_llm(model, enable_lora=True))
    one = LoRARequest("name", 1, str(adapters[0]))
    files = tmp_path / "base", tmp_path / "one"
    assert opened[0].save_prefix({"prompt_token_ids": PROMPT}, files[0]) == 64
    assert opened[0].save_prefix({"prompt_token_ids": PROMPT}, files[1], lora_request=one) == 64
    told = ask(opened[0])[0], ask(opened[0], lora_request=one)[0]
    opened.pop().close()

    opened.append(open_llm(model, enable_lora=True))
    [llm] = opened
    assert ask(llm)[1] == 0 and llm.reset_prefix_cache()
    assert llm.load_prefix(files[0]) == llm.load_prefix(files[0]) == 64
    assert ask(llm, lora_request=one)[1] == 0, "the base model's KV is not the adapter's"
    assert llm.load_prefix(str(files[1])) == 64
    assert llm.reset_prefix_cache() and llm.load_prefix(files[1]) == 64
    two = LoRARequest("other", 2, str(adapters[1]))
    assert ask(llm, lora_request=two)[1] == 0, "nor another adapter's"
    assert ask(llm, lora_request=one) == (told[1], 64)
    assert llm.load_prefix(files[0]) == 64 and ask(llm) == (told[0], 64)
    core_of(llm).check()


def test_a_file_of_something_else_loads_nothing(model: Path, tmp_path: Path, opened: list[LLM]) -> None:
    opened.append(open_llm(model, dtype="float32"))
    opened.append(open_llm(model, dtype="bfloat16"))
    file = tmp_path / "prefix"
    assert opened[0].save_prefix({"prompt_token_ids": PROMPT}, file) == 64
    content = file.read_bytes()
    assert opened[1].load_prefix(file) == 0
    page = len(content) // 4
    assert page > ALIGNMENT
    opened[0].reset_prefix_cache()
    for changed, tokens in (
        (b"", 0),
        (b"something else" * 100, 0),
        (content[: page // 2], 0),
        (content[: page * 2 + 50], 32),
        (content[page:], 0),
        (content[:page] + content[page * 2 :], 16),
        (content[: page + 100] + b"x" + content[page + 101 :], 16),
    ):
        file.write_bytes(changed)
        opened[0].reset_prefix_cache()
        assert opened[0].load_prefix(file) == tokens
        assert ask(opened[0])[1] == tokens
    with pytest.raises(OSError, match="No such file"):
        opened[0].load_prefix(tmp_path / "none")
    with pytest.raises(RequestError):
        opened[0].save_prefix({"prompt_token_ids": PROMPT}, file, adapter="none")


def test_a_pool_without_room_loads_what_fits(model: Path, tmp_path: Path, opened: list[LLM]) -> None:
    opened.append(open_llm(model))
    file = tmp_path / "prefix"
    opened[0].save_prefix({"prompt_token_ids": PROMPT}, file)
    opened.append(open_llm(model, num_gpu_blocks_override=3, max_model_len=20, kv_cache_memory=None))
    assert opened[1].load_prefix(file) == 48
    core_of(opened[1]).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_host_gib": 1.0}, "the KV pool of a CPU is in the host's memory"),
        ({"kv_disk": "DIR", "enable_prefix_caching": False}, "--enable-prefix-caching"),
        ({"kv_disk_key_file": "FILE"}, "needs --kv-disk"),
        ({"kv_disk": "DIR", "kv_disk_key_file": "DIR/none"}, "cannot be read"),
        ({"kv_disk": "FILE"}, "cannot be used"),
        ({"kv_disk": "DIR", "kv_disk_key_file": "FILE"}, "32 bytes or 64 hexadecimal digits"),
        ({"kv_disk_gib": 0.0}, "at least"),
    ],
)
def test_options_that_cannot_be_are_refused(model: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    (tmp_path / "file").write_text("short")
    words = {"DIR": str(tmp_path / "dir"), "FILE": str(tmp_path / "file"), "DIR/none": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match=message):
        open_llm(model, **{name: words.get(value, value) for name, value in options.items()})
