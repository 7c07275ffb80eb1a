"""Adapters on stacked experts by all versions of PEFT, against the logits that these versions computed."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.machine.thoroughness import taking_turns
from support.models.lora_driver import AdaptedRun
from support.models.peft_versions import (
    NUM_LOGITS,
    SIZE_KEYS,
    SIZES,
    TOKENS,
    Case,
    cases,
    recorded_logits,
    rewrite_adapter,
    save_base,
)

from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.lora.base_projections import BaseLayout, StoredExperts
from rootgraft.lora.errors import AdapterError
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.published.expert_layouts import layouts_of_version
from rootgraft.lora.read_adapter import AdapterReader

VERSIONS = ("0.18.1", "0.19.0", "0.19.1", "0.21.2")
SQUARE = {"square gate_up": "gate_up_proj", "square down": "down_proj"}
BOTH = ("gate_up_proj", "down_proj")
# Of version 4 and 5 of transformers, which no adapter tells: one layout of the two.
UNTOLD = {("gpt_oss", "0.19.0"), ("gpt_oss", "0.19.1"), ("gpt_oss", "0.21.2")} | {
    ("qwen3_vl_moe", version) for version in VERSIONS
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@functools.lru_cache(maxsize=4)
def loaded(family: str, sizes: str, bases: Path) -> tuple[DecoderModel, BaseLayout]:
    folder = save_base(family, sizes, bases / f"{family} {sizes}")
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    return model, base_layout(model, folder, dummy=False)


def edit(folder: Path, **fields: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def check_logits(case: Case, version: str, folder: Path, bases: Path) -> None:
    model, layout = loaded(case.family, case.sizes, bases)
    bank = AdapterBank(layout, 1)
    bank.install(0, AdapterReader(layout, 64).read(str(folder)))
    ours = AdaptedRun(model, bank, [0]).extend([TOKENS])[0][-1, :NUM_LOGITS]
    expected = recorded_logits(case, version)
    torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-4 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize(
    ("family", "version"),
    [(family, version) for at, family in enumerate(SIZE_KEYS) for version in taking_turns(VERSIONS, 2, at)],
)
def test_an_adapter_means_what_its_version_of_peft_trained(
    family: str, version: str, tmp_path: Path, bases: Path
) -> None:
    """Of square and of other experts; without a version only where one layout fits."""
    for i, case in enumerate(each for each in cases() if each.family == family):
        folder = rewrite_adapter(case, version, tmp_path / str(i))
        is_either = SQUARE.get(case.sizes) in case.parameters and case.parameters != BOTH
        if is_either and (family, version) in UNTOLD:
            assert refusal(folder, case, bases).option == "peft_version"
            continue
        check_logits(case, version, folder, bases)
        edit(folder, peft_version=None)
        if is_either:
            assert "fit its experts' inputs and outputs in either order" in str(refusal(folder, case, bases))
        else:
            check_logits(case, version, folder, bases)


def refusal(folder: Path, case: Case, bases: Path) -> AdapterError:
    reader = AdapterReader(loaded(case.family, case.sizes, bases)[1], 64)
    with pytest.raises(AdapterError) as found:
        reader.check(str(folder))
    with pytest.raises(AdapterError, match=r".") as again:
        reader.read(str(folder))
    assert str(found.value) == str(again.value)
    return found.value


def test_the_same_tensors_of_two_versions_share_no_cached_prefix(tmp_path: Path, bases: Path) -> None:
    case = Case("qwen3_moe", "square gate_up", ("gate_up_proj",))
    folder = rewrite_adapter(case, "0.18.1", tmp_path / "adapter")
    reader = AdapterReader(loaded(case.family, case.sizes, bases)[1], 64)
    old = reader.read(str(folder)).digest
    edit(folder, peft_version="0.18.0")
    assert reader.read(str(folder)).digest == old
    edit(folder, peft_version="0.19.1")
    assert reader.read(str(folder)).digest != old


def test_what_the_version_does_not_write_is_refused(tmp_path: Path, bases: Path) -> None:
    case = Case("mixtral", "no square", BOTH)
    folder = rewrite_adapter(case, "0.18.1", tmp_path / "adapter")
    edit(folder, peft_version="0.21.2")
    found = refusal(folder, case, bases)
    assert found.option == "peft_version"
    assert "takes the experts' outputs, which PEFT 0.21.2 does not write for this model" in str(found)


def test_a_version_that_no_stacked_expert_needs_is_no_matter(tmp_path: Path, bases: Path) -> None:
    case = Case("mixtral", "no square", BOTH)
    folder = rewrite_adapter(case, "0.21.2", tmp_path / "adapter")
    for version in (None, "", 7, ["0.18"], "next", "9" * 200):
        edit(folder, peft_version=version)
        check_logits(case, "0.21.2", folder, bases)


@pytest.mark.parametrize(
    ("version", "stored", "layouts"),
    [
        ("0.17.0", "outputs first", {"outputs"}),
        ("0.18.1", "marked", {"inputs"}),
        ("0.18", "inputs first", {"inputs"}),
        ("0.18.0.dev0@4b02d3b", "outputs first", {"outputs"}),
        ("0.18.1.dev0@4b02d3b", "outputs first", {"inputs", "outputs"}),
        ("0.18.2.dev0@UNKNOWN", "marked", {"inputs", "outputs"}),
        ("0.19.0rc1", "marked", {"inputs", "outputs"}),
        ("0.19.0", "marked", {"outputs"}),
        ("0.19.0", "outputs first", {"outputs"}),
        ("0.19.0.post1", "marked", {"outputs"}),
        ("0.19.1.dev0", "inputs first", {"inputs", "outputs"}),
        ("0.19.1", "inputs first", {"outputs"}),
        ("0.19.2.dev0", "outputs first", {"inputs"}),
        ("0.20.0+cu130", "marked", {"inputs"}),
        ("1.0.0", "outputs first", {"inputs"}),
        ("", "outputs first", {"inputs", "outputs"}),
        ("latest", "marked", {"inputs", "outputs"}),
    ],
)
def test_the_layout_of_a_version(version: str, stored: StoredExperts, layouts: set[str]) -> None:
    assert layouts_of_version(version, (stored,)) == layouts


@given(st.text(max_size=30))
def test_any_text_is_a_version(text: str) -> None:
    assert layouts_of_version(text, ("outputs first",)) <= {"inputs", "outputs"}


def test_the_cases_differ_where_both_layouts_fit() -> None:
    """Else the wrong one would pass for the right one."""
    for family in SIZE_KEYS:
        for sizes in SQUARE:
            assert SIZES[sizes][0] in (SIZES[sizes][1], 2 * SIZES[sizes][1])
            alone = Case(family, sizes, (SQUARE[sizes],))
            versions = ("0.18.1", "0.19.0") if family == "gpt_oss" else ("0.18.1", "0.21.2")
            first, second = (recorded_logits(alone, version) for version in versions)
            assert (first - second).abs().max() > 5e-3
