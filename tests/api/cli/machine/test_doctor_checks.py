"""`rootgraft doctor MODEL` over every form of the page's table: form, memory and products of the loaded model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
import torch
from gguf import GGMLQuantizationType
from support.models.quantised_llama import held_bytes, save_quantised, write_blocks

from rootgraft.api.cli.machine.doctor_checks import check_model
from rootgraft.engine.checkpoint.read_config import open_checkpoint
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.loading import measured_form, weight_forms
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.model_tools.weight_plan import plan_weights
from rootgraft.kernels import quantised_weights
from rootgraft.kernels.layouts.packed_weights import Format
from rootgraft.kernels.ops import QuantisedLinear

PAGE: Final = Path(__file__).parents[4] / "docs" / "reference" / "models.md"
CPU: Final = torch.device("cpu")
BOTH: Final = "as stored for steps of few rows, in bfloat16 for more"
FLOATS: Final = "as stored, numbers rounded to bfloat16 in products"
BYTES: Final = "integers of 8 bits as stored, sums scaled in fp32"
ROUNDED: Final = "integers of 8 bits as stored, activations rounded to 8 bits too"
COMPUTED: Final = {"blocks": BOTH, "8 bits": BYTES, "FP8": FLOATS, "widened": "in bfloat16"}

pytestmark = pytest.mark.skipif(not quantised_weights.available(), reason="no compiler")


def forms_of_page() -> dict[str, str]:
    """What a CPU keeps of each form, by the table."""
    table = PAGE.read_text("utf-8").partition("| stored as |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return {name: kept for names, _, kept, *_ in rows for name in names.split(", ")}


FORMS: Final = forms_of_page()


@pytest.mark.parametrize("form", FORMS)
def test_doctor_tells_what_a_loaded_model_is(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_forms, "measure_few_rows", lambda *_: 4)
    monkeypatch.setattr(measured_form, "is_dynamic_faster", lambda *_: False)
    kind, path = form.removeprefix("GGUF "), tmp_path
    if kind != form:
        path = write_blocks(tmp_path / "model.gguf", GGMLQuantizationType[kind])
    else:
        save_quantised(form, tmp_path)
    config = EngineConfig(model=str(path), device="cpu", dtype="bfloat16", kv_cache_memory=0.01)
    found = {each.name: each.value for each in check_model(config)}
    assert found["stored"].startswith(f"{kind}; " if kind != form else "62% "), found["stored"]
    told, _, _ = found["computed"].partition("; ")
    chosen = weight_forms.choose_weight_form(config, CPU, torch.bfloat16, open_checkpoint(path))
    model = load_model(path, dtype=torch.bfloat16, device=CPU, max_positions=1, weights=chosen)
    kept = model.layers[0].attention.qkv.packed
    expected = COMPUTED.get(FORMS[form], BOTH if FORMS[form].startswith("as ") else "")
    if isinstance(kept, QuantisedLinear) and kept.format is Format.CHANNELS:
        expected = ROUNDED
    assert told == expected
    assert isinstance(kept, QuantisedLinear) == (told != "in bfloat16")
    if isinstance(kept, QuantisedLinear):
        assert (kept.widened is not None) == (told == BOTH)
    planned = plan_weights(config, path).memory_bytes
    assert abs(planned / held_bytes(model) - 1) < 0.02
    assert re.match(r"[\d.]+ [kM]B for weights, of ", found["memory"])
