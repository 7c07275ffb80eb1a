"""Memory of a model's weights in a form: computed before they are read; without enough memory they are refused."""

from __future__ import annotations

import math

import torch

from ...kernels import quantised_weights
from ..checkpoint.model_config import ModelConfig
from ..error_stream import write_line
from ..errors import ConfigError
from .tensor_names import EMBEDDING, HEAD, Shape, expected_shapes, mixture_shapes
from .weight_forms import FORMS, WeightForm, has_kernels
from .weight_readers import WeightSource

_GIB = 1 << 30
_SCALE_BYTES = 4
_KEPT_SIZES = {
    "Q3_K": (110, 114),
    "IQ2": (110, 114),
    "Q4_K": (144, 148),
    "Q5_K": (176, 180),
    "Q6_K": (210, 210),
    "IQ4_XS": (136, 138),
}
"""Bytes of a super-block in a file, and in memory."""


def fitting_form(
    source: WeightSource,
    config: ModelConfig,
    dtype: torch.dtype,
    form: WeightForm,
    device: torch.device,
    available: int,
) -> WeightForm:
    """Return the form of weights in memory: ``form``, or blocks as they are stored if widened ones do not fit.

    Both give the same results, so stored blocks, the smaller form, can replace ``form``, which is faster.

    Args:
        available: bytes of memory.

    Raises:
        ConfigError: no form with the same results fits. It is raised before any weight is read, and names the memory
            that is needed and a ``--quantization`` that needs less.
    """
    needed = weight_bytes(source, config, dtype, form)
    if needed <= available:
        return form
    if form in ("plain", "stored_both") and has_kernels(device, dtype):
        stored = weight_bytes(source, config, dtype, "stored_widened")
        if stored <= available:
            write_line(
                f"Weights are kept as stored: {stored / _GIB:.1f} GiB; widened they need {needed / _GIB:.1f}, and "
                f"{available / _GIB:.1f} GiB of memory are available"
            )
            return "stored_widened"
    offered = FORMS if has_kernels(device, dtype) else {}
    others = {option: weight_bytes(source, config, dtype, other) for option, other in offered.items()}
    fitting = {option: size for option, size in others.items() if size <= available and size < needed}
    names = {other: f"with --quantization {option}" for option, other in FORMS.items()}
    what = names.get(form, f"in {str(dtype).removeprefix('torch.')}")
    where = " on the GPU beside the smallest KV pool" if device.type == "cuda" else ""
    text = (
        f"The weights need {needed / _GIB:.1f} GiB {what}; {available / _GIB:.1f} GiB of memory are available{where}."
    )
    if not fitting:
        raise ConfigError(f"{text} Free some memory, or use a smaller model.")
    choice = min(fitting, key=lambda option: (fitting[option], option))
    raise ConfigError(f"{text} Try: rootgraft serve --quantization {choice} ({fitting[choice] / _GIB:.1f} GiB)")


def tensor_bytes(source: WeightSource, config: ModelConfig, dtype: torch.dtype, form: WeightForm) -> dict[str, int]:
    """Return the least bytes of each tensor of a model in a form, of a rank's source of its part of the head."""
    shapes = {name: source.shapes.get(name, shape) for name, shape in expected_shapes(config).items()}
    products = {name for name, shape in shapes.items() if len(shape) > 1 and (name != EMBEDDING or config.tied_head)}
    return {
        name: held_bytes(name, shape, source, dtype, form, is_product=name in products)
        for name, shape in shapes.items()
    }


def weight_bytes(source: WeightSource, config: ModelConfig, dtype: torch.dtype, form: WeightForm) -> int:
    """Return the least bytes of a model's weights in a form: scales of rows and padding of panels come on top."""
    found = tensor_bytes(source, config, dtype, form)
    if not config.tied_head:
        return sum(found.values())
    embedding = expected_shapes(config)[EMBEDDING]
    head = source.shapes.get(HEAD, embedding)
    # A plain head that is tied to the embedding is counted twice, because the embedding looks up rows in a copy that is
    # not packed. A rank with a part of the head holds this part in addition to the whole embedding.
    is_plain = found[EMBEDDING] == math.prod(embedding) * dtype.itemsize
    beside = held_bytes(HEAD if head != embedding else EMBEDDING, head, source, dtype, form, is_product=True)
    return sum(found.values()) + (beside if is_plain or head != embedding else 0)


def token_bytes(source: WeightSource, config: ModelConfig, dtype: torch.dtype, form: WeightForm) -> float:
    """Return the least bytes of weights that a step of one token reads.

    All tensors count except the experts to which the token is not routed, and the embedding, of which only one row is
    read. If a weight is kept in two forms, the smaller one counts.
    """
    form = "stored" if form == "stored_both" else form
    found, total = tensor_bytes(source, config, dtype, form), weight_bytes(source, config, dtype, form)
    is_head_too = config.tied_head and total == sum(found.values())
    idle = 0.0 if is_head_too else float(found[EMBEDDING])
    for index, layer in enumerate(config.layers):
        mixture = layer.mixture
        if mixture is None:
            continue
        shapes = mixture_shapes(f"model.layers.{index}.{mixture.names.block}", mixture, config.hidden_size)
        experts = sum(found[name] for name, shape in shapes.items() if len(shape) > 2 or ".experts." in name)
        idle += experts * (1 - mixture.top_k / mixture.num_experts)
    return total - idle


def held_bytes(
    name: str, shape: Shape, source: WeightSource, dtype: torch.dtype, form: WeightForm, *, is_product: bool
) -> int:
    """Return the bytes of a tensor in a form. The rows of a packed matrix are assumed to fill whole panels.

    For ``stored_both`` this is the largest size: a measurement may show that one of the two forms suffices.

    Args:
        is_product: whether it is packed for matrix products, and is neither a vector nor an embedding.
    """
    count = math.prod(shape)
    if form == "grouped":
        grouped = source.grouped_bytes(name)
        return count * dtype.itemsize if grouped is None else grouped
    if form.startswith("stored"):
        stored = source.stored(name)
        if form in ("stored_widened", "stored_both") and (scales := source.byte_scales(name)):
            return count + _SCALE_BYTES * scales * shape[0]
        if not stored or stored[0] not in quantised_weights.BLOCK_SIZES:
            return count * dtype.itemsize
        return _kept_bytes(*stored) + (count * dtype.itemsize if form == "stored_both" and is_product else 0)
    return count if is_product and form.startswith("int8") else count * dtype.itemsize


def _kept_bytes(block_type: str, stored: int) -> int:
    """Return the bytes of blocks in memory, where each scale of a super-block and each number of Q6_K takes a byte."""
    in_file, in_memory = _KEPT_SIZES.get(block_type, (1, 1))
    return stored // in_file * in_memory
