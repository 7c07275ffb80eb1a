"""Saved modules: whole weights that PEFT saves with an adapter to replace the model's embedding, head, norms or rows.

lm_head.weight                                       ``modules_to_save``, or the vocabulary was resized
embed_tokens.base_layer.weight                       the whole embedding, if LoRA is on the embedding
embed_tokens.token_adapter.base_layer.weight         the whole embedding, with ``trainable_token_indices``
embed_tokens.token_adapter.trainable_tokens_delta    the new rows of these tokens (not differences, as its name says)
layers.0.input_layernorm.weight                      ``modules_to_save``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..base_projections import EMBEDDING, HEAD, SCORE, BaseLayout
from ..config import AdapterConfig
from ..errors import AdapterError

MOST_ADDED_TOKENS = 4096
"""Largest number of tokens that an adapter may add to the base model's vocabulary."""

MOST_CLASSES = 1 << 16
"""Largest number of classes of an adapter's classification head."""

WHOLE = ("weight", "base_layer.weight", "token_adapter.base_layer.weight")
"""Names of the tensors in an adapter's file that are a module's whole weight."""

DELTA = "token_adapter.trainable_tokens_delta"

# Names of tensors that are copies of the base model's weights, or of a tensor that the file contains under its own
# name.
UNUSED = ("token_adapter.trainable_tokens_original", "original_module.weight", "original_module.bias")
ALIASES = ("modules_to_save.weight", "modules_to_save.bias")

Parts = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of an embedding or a head.

    Attributes:
        rows: [n, H].
        ids: [n] int64 ascending, the tokens of the rows; None for the whole vocabulary, 0 to n - 1.
    """

    rows: Tensor
    ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Weight and bias of a norm that replace the base model's; None to keep the base model's."""

    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class SavedModules:
    """An adapter's weights that replace the base model's.

    Attributes:
        embedding: rows of the embedding; None for the base model's.
        head: rows of the head; None for the base model's.
        norms: norms by their names in the base model.
        score: [classes, H], a classification head.
    """

    embedding: TokenRows | None = None
    head: TokenRows | None = None
    norms: Mapping[str, NormWeights] = field(default_factory=dict)
    score: Tensor | None = None

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens of the adapter's vocabulary; None for the base model's."""
        whole = (part for part in (self.embedding, self.head) if part is not None and part.ids is None)
        return next((len(part.rows) for part in whole), None)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return all tensors with their names, in a fixed order."""
        found = []
        for name, part in ((EMBEDDING, self.embedding), (HEAD, self.head)):
            if part is not None:
                found.append((f"{name}.rows", part.rows))
                found += [] if part.ids is None else [(f"{name}.ids", part.ids)]
        found += [] if self.score is None else [(f"{SCORE}.weight", self.score)]
        for name in sorted(self.norms):
            norm = self.norms[name]
            found += [] if norm.weight is None else [(f"{name}.weight", norm.weight)]
            found += [] if norm.bias is None else [(f"{name}.bias", norm.bias)]
        return found


def saved_modules(parts: Parts, config: AdapterConfig, layout: BaseLayout) -> SavedModules:
    """Return an adapter's whole weights from its tensors, by module of the base model and part.

    Raises:
        AdapterError: the config names a module whose tensors are missing, or the reverse; a shape is wrong; embedding
            and head have different vocabularies.
    """
    if not layout.takes_own:
        _refuse_own(parts, config, layout.without_own)
        return SavedModules()
    _check_named(parts, config, layout)
    whole = {name: _whole(name, parts.get(name, {}), layout) for name in (EMBEDDING, HEAD)}
    _check_vocabularies(whole, layout)
    rows = _token_rows(parts, config, layout, whole)
    embedding, head = (_merged(whole[name], rows.get(name)) for name in (EMBEDDING, HEAD))
    return SavedModules(embedding, head, dict(_norms(parts, config, layout)), _score(parts.get(SCORE, {}), layout))


def _score(parts: Mapping[str, Tensor], layout: BaseLayout) -> Tensor | None:
    """Return the classification head; None without one. Raises AdapterError for a wrong shape, or a bias."""
    if "bias" in parts:
        raise AdapterError(f"The adapter has a bias of {SCORE}, but classification heads have no bias here.", SCORE)
    weight, (_, hidden) = parts.get("weight"), _shape(EMBEDDING, layout)
    if weight is None:
        return None
    if weight.dim() != 2 or weight.shape[1] != hidden or not 1 <= len(weight) <= MOST_CLASSES:
        raise AdapterError(
            f"The tensor {SCORE}.weight has shape {list(weight.shape)}; it must be [1 to {MOST_CLASSES:,}, {hidden}].",
            SCORE,
        )
    return weight


def _refuse_own(parts: Parts, config: AdapterConfig, option: str) -> None:
    """Refuse weights that replace the base model's, for a model that does not support them."""
    if found := (*parts, *config.saved):
        raise AdapterError(
            f"The adapter has its own weights of {found[0]} (modules_to_save, trainable_token_indices or bias), "
            f"which {option} does not support; train linear modules with LoRA (target_modules).",
            found[0],
        )


def names_saved(config: AdapterConfig, name: str) -> bool:
    """Return whether ``modules_to_save`` includes the module of this name. Like PEFT, it compares the ends of names."""
    return name.endswith(config.saved) if config.saved else False


def _check_named(parts: Parts, config: AdapterConfig, layout: BaseLayout) -> None:
    """Check that modules named in ``modules_to_save`` exist, and that they are supported."""
    for name in (EMBEDDING, HEAD, *layout.norms):
        if names_saved(config, name) and "weight" not in parts.get(name, {}):
            raise AdapterError(
                f"modules_to_save names {name}, but adapter_model.safetensors has no tensor {name}.weight.",
                "modules_to_save",
            )
    for name in layout.modules:
        if name not in (EMBEDDING, HEAD) and names_saved(config, name):
            raise AdapterError(
                f"modules_to_save names {name}: embed_tokens, lm_head and norms are the only whole matrices that an "
                "adapter may replace; train others with LoRA (target_modules).",
                "modules_to_save",
            )


def _whole(name: str, parts: Mapping[str, Tensor], layout: BaseLayout) -> Tensor | None:
    """Return the adapter's whole matrix of the embedding or the head; None if the adapter uses the base model's."""
    present = [part for part in WHOLE if part in parts]
    if len(present) > 1:
        raise AdapterError(f"The tensors {name}.{present[0]} and {name}.{present[1]} belong to the same module.", name)
    if not present:
        return None
    weight, (size, hidden) = parts[present[0]], _shape(name, layout)
    if weight.dim() != 2 or weight.shape[1] != hidden:
        raise AdapterError(
            f"The tensor {name}.{present[0]} has shape {list(weight.shape)}; the base model's is [{size}, {hidden}].",
            name,
        )
    if len(weight) > size + MOST_ADDED_TOKENS:
        raise AdapterError(
            f"The tensor {name}.{present[0]} has {len(weight):,} rows; the base model has {size:,} tokens, and an "
            f"adapter may add at most {MOST_ADDED_TOKENS:,}.",
            name,
        )
    if len(weight) == size and present[0] != "weight" and _is_base(name, weight, layout):
        return None
    return weight


def _shape(name: str, layout: BaseLayout) -> tuple[int, int]:
    """Return the number of tokens and the hidden size of the embedding or the head."""
    outputs, inputs = layout.modules[name]
    return (inputs, outputs) if name == EMBEDDING else (outputs, inputs)


def _is_base(name: str, weight: Tensor, layout: BaseLayout) -> bool:
    """Return whether a whole matrix equals the base model's; False if only the shape of the matrix is known."""
    if weight.is_meta:
        return False
    return torch.equal(weight.to(layout.dtype), layout.read_weight(name).to(layout.dtype).cpu())


def _check_vocabularies(whole: Mapping[str, Tensor | None], layout: BaseLayout) -> None:
    """Check that embedding and head have the same tokens."""
    sizes = {name: _shape(name, layout)[0] if weight is None else len(weight) for name, weight in whole.items()}
    if sizes[EMBEDDING] != sizes[HEAD]:
        missing = next((name for name, weight in whole.items() if weight is None), None)
        remedy = f"; save {missing} with the adapter (modules_to_save)" if missing else ""
        raise AdapterError(
            f"The adapter's {EMBEDDING} has {sizes[EMBEDDING]:,} tokens, but its {HEAD} has {sizes[HEAD]:,}{remedy}.",
            HEAD if missing is None else missing,
        )


def _token_rows(
    parts: Parts, config: AdapterConfig, layout: BaseLayout, whole: Mapping[str, Tensor | None]
) -> dict[str, TokenRows]:
    """Return the rows of ``trainable_token_indices`` by module. A tied head has the embedding's rows."""
    found: dict[str, TokenRows] = {}
    wanted = {name: ids for name in (EMBEDDING, HEAD) if (ids := _indices(name, config)) is not None}
    differ = len(wanted) == 2 and wanted[EMBEDDING] != wanted[HEAD]
    tied = layout.tied and EMBEDDING in wanted and not differ
    for name, ids in wanted.items():
        if tied and name == HEAD:
            continue
        delta = parts.get(name, {}).get(DELTA)
        if delta is None:
            raise AdapterError(
                f"trainable_token_indices names {name}, but adapter_model.safetensors has no tensor {name}.{DELTA}.",
                "trainable_token_indices",
            )
        matrix = whole[name]
        size = _shape(name, layout)[0] if matrix is None else len(matrix)
        found[name] = _sorted_rows(name, delta, ids, size, layout)
    if tied:
        found[HEAD] = found[EMBEDDING]
    for name, tensors in parts.items():
        if DELTA in tensors and name not in found:
            raise AdapterError(
                f"The adapter has a tensor {name}.{DELTA}, which trainable_token_indices does not name.",
                "trainable_token_indices",
            )
    return found


def _indices(name: str, config: AdapterConfig) -> tuple[int, ...] | None:
    return next((ids for suffix, ids in config.token_indices if name.endswith(suffix)), None)


def _sorted_rows(name: str, delta: Tensor, ids: tuple[int, ...], size: int, layout: BaseLayout) -> TokenRows:
    expected = [len(ids), _shape(name, layout)[1]]
    if list(delta.shape) != expected:
        raise AdapterError(
            f"The tensor {name}.{DELTA} has shape {list(delta.shape)}; trainable_token_indices has {len(ids)} tokens, "
            f"so it must be {expected}.",
            name,
        )
    if (largest := max(ids)) >= size:
        raise AdapterError(
            f"trainable_token_indices has the token {largest}; {name} has tokens 0 to {size - 1}.",
            "trainable_token_indices",
        )
    tokens, order = torch.tensor(ids).sort()
    return TokenRows(delta[order], tokens)


def _merged(whole: Tensor | None, rows: TokenRows | None) -> TokenRows | None:
    if whole is None or rows is None:
        return rows if whole is None else TokenRows(whole)
    assert rows.ids is not None
    if whole.is_meta:
        return TokenRows(whole)
    merged = whole.to(torch.promote_types(whole.dtype, rows.rows.dtype), copy=True)
    merged[rows.ids] = rows.rows.to(merged.dtype)
    return TokenRows(merged)


def _norms(parts: Parts, config: AdapterConfig, layout: BaseLayout) -> list[tuple[str, NormWeights]]:
    found = []
    for name in sorted(parts.keys() & layout.norms.keys()):
        weight, bias = parts[name].get("weight"), parts[name].get("bias")
        if weight is not None and not names_saved(config, name):
            raise AdapterError(
                f"The adapter has a tensor {name}.weight, which modules_to_save does not name.", "modules_to_save"
            )
        for kind, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and tuple(tensor.shape) != layout.norms[name]:
                raise AdapterError(
                    f"The tensor {name}.{kind} has shape {list(tensor.shape)}; the base model's is "
                    f"{list(layout.norms[name])}.",
                    name,
                )
        if bias is not None:
            check_bias(name, layout)
        found.append((name, NormWeights(weight, bias)))
    return found


def check_bias(name: str, layout: BaseLayout) -> Tensor:
    """Return the base model's bias of a module. Raises AdapterError if the module has no bias."""
    bias = layout.read_bias(name)
    if bias is None:
        raise AdapterError(f"The adapter has a bias of {name}, but the base model has none.", name)
    return bias
