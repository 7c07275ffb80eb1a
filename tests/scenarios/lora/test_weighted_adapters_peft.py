"""Weighted combinations of adapters in an engine, against PEFT's ``add_weighted_adapter(combination_type="cat")``."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import check_adapters, core_of
from support.models.lora_models import LINEARS, base, copy_of, make_adapter
from support.models.tiny_fixtures import CHAT_TEMPLATE
from support.models.tiny_tokenizers import train_byte_level, write_folder

from rootgraft import LLM, SamplingParams
from rootgraft.engine.errors import RequestError, UnknownModel

PROMPT = list(range(5, 25))
PLAIN: dict[str, dict[str, Any]] = {
    "a": {"r": 2, "target_modules": LINEARS},
    "b": {"r": 5, "target_modules": ["q_proj", "down_proj"], "lora_alpha": 3, "use_rslora": True},
    "c": {"r": 3, "target_modules": ["embed_tokens", "lm_head", "v_proj"], "rank_pattern": {"v_proj": 4}},
}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora"),
    "biased": ({"lora_bias": True}, "lora_bias"),
    "norms": ({"modules_to_save": ["norm"]}, "modules_to_save"),
    "rows": ({"trainable_token_indices": {"embed_tokens": [3]}}, "trainable_token_indices"),
    "activated": ({"alora_invocation_tokens": [7, 8]}, "alora_invocation_tokens"),
}


@pytest.fixture(scope="module")
def folder(bases: Path) -> Path:
    """A tiny model with a tokenizer, and adapters of it."""
    base("wordy", bases)
    write_folder(bases / "wordy", train_byte_level().to_str(), eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)
    kinds = PLAIN | {name: options for name, (options, _) in OTHERS.items()}
    for seed, (name, options) in enumerate(kinds.items()):
        make_adapter("wordy", bases, bases / "kinds" / name, seed, **options)
    return bases


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    options = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 400, "max_lora_rank": 11}
    llm = LLM(str(folder / "wordy"), enable_lora=True, lora_dir=str(folder / "kinds"), **options)
    yield llm
    llm.close()


class Oracle:
    """PEFT with all plain adapters, and combinations of them made as they are asked for."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from peft import PeftModel

            paths = {name: folder / "kinds" / name for name in PLAIN}
            first, *rest = paths
            self._model: Any = PeftModel.from_pretrained(copy_of("wordy", folder), paths[first], adapter_name=first)
            for name in rest:
                self._model.load_adapter(paths[name], adapter_name=name)

    @torch.no_grad()
    def logprobs(self, weights: Mapping[str, float]) -> list[float]:
        """The logprob of each token of ``PROMPT`` but the first."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model.add_weighted_adapter(list(weights), list(weights.values()), "sum", combination_type="cat")
            self._model.set_adapter("sum")
            logits = self._model(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
            self._model.delete_adapter("sum")
        return [float(logits[at, token]) for at, token in enumerate(PROMPT[1:])]


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def logprobs(llm: LLM, adapter: str) -> list[float]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params, adapter=adapter)
    assert output.prompt_logprobs is not None
    return [each[token].logprob for each, token in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True) if each]


def written(weights: Mapping[str, float]) -> str:
    return "+".join(f"{name}:{weight}" for name, weight in weights.items())


WEIGHTS = st.floats(-2, 2, allow_subnormal=False).map(lambda weight: round(weight, 3))


@settings(max_examples=12, derandomize=True, deadline=None)
@given(st.permutations(sorted(PLAIN)), st.integers(2, 3), st.lists(WEIGHTS, min_size=3, max_size=3))
def test_logprobs_are_those_of_peft(
    llm: LLM, oracle: Oracle, names: list[str], count: int, values: list[float]
) -> None:
    weights = dict(zip(names[:count], values, strict=False))
    assert logprobs(llm, written(weights)) == pytest.approx(oracle.logprobs(weights), abs=1e-4)


def test_one_adapter_may_have_a_weight(llm: LLM, oracle: Oracle) -> None:
    assert logprobs(llm, "a:0.5") == pytest.approx(oracle.logprobs({"a": 0.5}), abs=1e-4)
    assert logprobs(llm, "a:1") == pytest.approx(logprobs(llm, "a"), abs=1e-5)


def cached(llm: LLM, adapter: str, prompt: list[int]) -> int:
    [output] = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1), adapter=adapter)
    assert output.num_cached_tokens is not None
    return output.num_cached_tokens


def test_the_cache_is_that_of_contents_and_weights(llm: LLM) -> None:
    """The same in another order is the same; another weight, and a part alone, are others."""
    prompt = list(range(30, 70))
    assert cached(llm, "a:0.25+b:0.5", prompt) == 0
    assert cached(llm, "b:0.5+a:0.25", prompt) == len(prompt) - 1
    assert cached(llm, "a:0.25+b:0.75", prompt) == 0
    assert cached(llm, "a", prompt) == 0
    assert cached(llm, "b", prompt) == 0


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, (_, option) in OTHERS.items()])
def test_what_does_not_combine_is_refused_by_name(llm: LLM, name: str, option: str) -> None:
    assert len(logprobs(llm, name)) == len(PROMPT) - 1
    with pytest.raises(RequestError, match=f"'{name}' has .*{option}"):
        logprobs(llm, f"a:0.5+{name}:0.5")


@pytest.mark.parametrize(
    ("adapter", "fault"),
    [
        ("a:0.5+a:0.5", "given twice"),
        ("a:0.5+b:100.1", "from -100 to 100"),
        ("+".join(f"x{number}:1" for number in range(9)), "At most 8"),
        ("a:0.1+b:0.1+c:0.1+d:0.1", "d"),
    ],
)
def test_wrong_combinations_are_refused(llm: LLM, adapter: str, fault: str) -> None:
    with pytest.raises((RequestError, UnknownModel), match=fault):
        logprobs(llm, adapter)


def test_the_combined_rank_has_the_limit_of_an_adapter(folder: Path, llm: LLM) -> None:
    """In ``q_proj`` five adapters have rank 2 + 2 + 2 + 2 + 5, one too many."""
    for number in range(3):
        shutil.copytree(folder / "kinds" / "a", folder / "kinds" / f"a{number}", dirs_exist_ok=True)
    assert len(logprobs(llm, "a:1+a0:1+a1:1+b:1")) == len(PROMPT) - 1
    with pytest.raises(RequestError, match=r"rank 13 in .*_proj; the limit is 11"):
        logprobs(llm, "a:1+a0:1+a1:1+a2:1+b:1")


def test_a_part_that_goes_ends_the_combination(folder: Path, llm: LLM, oracle: Oracle) -> None:
    """Replaced, its new weights count; unloaded, the combination is unknown; KV of the old content is dropped."""
    llm.load_adapter("part", "a")
    weights = "part:0.5+b:0.25"
    assert logprobs(llm, weights) == pytest.approx(oracle.logprobs({"a": 0.5, "b": 0.25}), abs=1e-4)
    llm.load_adapter("part", "c", replace=True)
    assert logprobs(llm, weights) == pytest.approx(oracle.logprobs({"c": 0.5, "b": 0.25}), abs=1e-4)
    llm.unload_adapter("part")
    with pytest.raises((RequestError, UnknownModel), match=r"part|folder"):
        logprobs(llm, weights)
    check_adapters(core_of(llm))
    llm.load_adapter("part", "a")
    assert logprobs(llm, weights) == pytest.approx(oracle.logprobs({"a": 0.5, "b": 0.25}), abs=1e-4)
