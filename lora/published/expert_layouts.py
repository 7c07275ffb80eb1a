"""Expert layouts: orientation of an adapter's factors on stacked experts, from its version of PEFT and its shapes.

For a matrix of an expert with K inputs and N outputs, A is [r, K] and B [N, r] in the layout "inputs", and A is [r, N]
and B [K, r] in the layout "outputs", where the change of the matrix is the transpose of B A. The user of PEFT cannot
choose the layout. PEFT's rule has changed twice, and depends on how transformers stores the experts when the adapter is
trained.

    stored as                     before 0.19.0    0.19.0    since 0.19.1
    [E, N, K]                     outputs          outputs   inputs
    [E, K, N]                     inputs           inputs    outputs
    [E, K, N], is_transposed      inputs           outputs   inputs

An adapter does not name the version of transformers that trained it, and versions store gpt-oss and Qwen3-VL in two
different ways. For these models, the shapes of another tensor of the file decide: gpt-oss's ``down_proj`` is square,
its ``gate_up_proj`` is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from ..base_projections import ExpertModules, StoredExperts
from ..config import AdapterConfig
from ..errors import AdapterError

Layout = Literal["inputs", "outputs"]
GATE_UP, DOWN = "gate_up_proj", "down_proj"

_RULES: dict[StoredExperts, tuple[Layout, Layout, Layout]] = {
    "outputs first": ("outputs", "outputs", "inputs"),
    "inputs first": ("inputs", "inputs", "outputs"),
    "marked": ("inputs", "outputs", "inputs"),
}
"""The layouts that PEFT writes before 0.19.0, in 0.19.0, and since 0.19.1, by the layout of the stored experts."""

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?P<early>\.?(?:dev|rc|a|b)\d*)?(?:[.+@].*)?", re.DOTALL)
# Versions between which a development version may follow either rule.
_FIRST_UNSURE, _LAST_UNSURE = (0, 18, 1), (0, 19, 1)


def layout_of_file(
    stacked: Mapping[str, Mapping[str, Tensor]], experts: Mapping[str, ExpertModules], config: AdapterConfig
) -> Layout:
    """Return the layout of all pairs in an adapter's file, which one program has written.

    Args:
        stacked: "lora_A" and "lora_B" of each module, by the module's name in training.
        experts: the experts of each of these modules.

    Raises:
        AdapterError: the shapes fit no tensor of the experts, contradict the layout that ``peft_version`` writes, or
            fit both layouts and the version does not decide between them.
    """
    by_shape: set[Layout] = {"inputs", "outputs"}
    for trained, parts in stacked.items():
        fitting = tensors_of(trained, parts["lora_A"], parts["lora_B"], experts[trained]).keys()
        if not by_shape & fitting:
            raise AdapterError(f"A and B of {trained} are swapped compared with the modules before it.", trained)
        by_shape &= fitting
    trained = min(stacked)
    by_version = layouts_of_version(config.peft_version, experts[trained].stored)
    found = by_shape & by_version
    if not found:
        raise AdapterError(
            f"A of {trained} takes the experts' {by_shape.pop()}, which PEFT {config.peft_version} does not write for "
            "this model. Set peft_version to the version that trained the adapter.",
            "peft_version",
        )
    if len(found) == 1:
        return found.pop()
    named = f"peft_version {config.peft_version!r}" if config.peft_version else "an adapter without peft_version"
    raise AdapterError(
        f"A and B of {trained} fit its experts' inputs and outputs in either order, and {named} does not say which "
        "order it has. Set peft_version to the version that trained the adapter, or adapt gate_up_proj and down_proj "
        "both.",
        "peft_version",
    )


def tensors_of(trained: str, a: Tensor, b: Tensor, experts: ExpertModules) -> dict[Layout, str]:
    """Return, for each layout that fits, the experts' tensor to which a pair of factors with these shapes belongs.

    Raises:
        AdapterError: no tensor has fitting shapes.
    """
    sizes = {GATE_UP: (experts.hidden, 2 * experts.size), DOWN: (experts.size, experts.hidden)}
    found: dict[Layout, str] = {}
    if a.dim() == b.dim() == 2:
        for tensor, (inputs, outputs) in sizes.items():
            if (a.shape[1], b.shape[0]) == (inputs, outputs):
                found["inputs"] = tensor
            if (a.shape[1], b.shape[0]) == (outputs, inputs):
                found["outputs"] = tensor
    if not found:
        raise AdapterError(
            f"A and B of {trained} have shapes {list(a.shape)} and {list(b.shape)}, which fit neither {GATE_UP} nor "
            f"{DOWN} of its experts.",
            trained,
        )
    return found


def layouts_of_version(version: str, stored: tuple[StoredExperts, ...]) -> set[Layout]:
    """Return the layouts that a version of PEFT may have written; both for an unknown version."""
    parsed = _VERSION.fullmatch(version.strip())
    if parsed is None:
        return {"inputs", "outputs"}
    release = tuple(int(number or 0) for number in parsed.group(1, 2, 3))
    if parsed["early"] and _FIRST_UNSURE <= release <= _LAST_UNSURE:
        return {"inputs", "outputs"}
    period = 0 if release < (0, 19, 0) else 1 if release == (0, 19, 0) else 2
    return {_RULES[each][period] for each in stored}
