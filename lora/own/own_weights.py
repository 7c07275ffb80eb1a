"""Own weights: weights of an adapter that replace the base model's, and their use in one step.

LoRA adds to the results of the base model's weights. An embedding, a head or a norm that PEFT saved entirely
(``modules_to_save``, ``trainable_token_indices``, a resized vocabulary) replaces the base model's weight, but only for
the tokens of this adapter:

    embedding   own rows are read by token id
    head        own logits; beyond an adapter's vocabulary, if it is smaller than another one, logits are -inf
    norms       computed again for the adapter's tokens, from the same input
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...kernels.layouts.packed_weights import PackedLinear
from ...kernels.ops import Largest, largest_linear, linear
from ..published.saved_modules import NormWeights


def plain_linear(rows: Tensor) -> PackedLinear:
    """Return rows [n, H] as the weight of a matrix product, in the same memory."""
    return PackedLinear(rows.shape[1], rows.shape[0], rows, None, kernels=None)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class OwnRows:
    """Rows of an embedding or a head on one device. Equal rows of several adapters are one object.

    Attributes:
        key: SHA-256 of the rows, and their layout.
        rows: [n, H] of an embedding.
        packed: [n, H] of a head, in the layout of matrix products.
    """

    key: str
    rows: Tensor | None
    packed: PackedLinear | None

    @property
    def num_bytes(self) -> int:
        """Size of the rows in bytes."""
        return self.tensor.nbytes

    @property
    def tensor(self) -> Tensor:
        """The rows; for a head, in packed layout."""
        tensor = self.rows if self.packed is None else self.packed.weight
        assert tensor is not None
        return tensor

    def to(self, device: torch.device) -> OwnRows:
        """Copy the rows to a device, without waiting for the copy."""
        if self.rows is not None and self.rows.device.type != device.type:
            rows = self.rows.to(device, non_blocking=True)
            return OwnRows(self.key, rows, self.packed and plain_linear(rows))
        return self


@dataclass(frozen=True, slots=True)
class TokenPart:
    """An adapter's own rows of the embedding or head, for some or all tokens.

    Attributes:
        ids: [n] int64 ascending, the tokens of the rows; None for all tokens 0 .. n - 1.
    """

    own: OwnRows
    ids: Tensor | None

    @property
    def size(self) -> int:
        """Number of own rows of a head."""
        assert self.own.packed is not None
        return self.own.packed.out_features

    def rows_of(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows [n, H] of ``token_ids`` [n], and which of them are own rows, [n] bool; None if all are."""
        rows = self.own.rows
        assert rows is not None
        if self.ids is None:
            return rows[token_ids.clamp(max=len(rows) - 1)], None
        place = torch.searchsorted(self.ids, token_ids).clamp_(max=len(self.ids) - 1)
        return rows[place], self.ids[place] == token_ids

    def embed(self, token_ids: Tensor, y: Tensor, tokens: Tensor) -> None:
        """Write the own rows of ``token_ids`` [T] to ``y`` [T, H], only for the step's ``tokens`` [n]."""
        rows, is_own = self.rows_of(token_ids[tokens])
        rows = rows.to(y.dtype)
        y[tokens] = rows if is_own is None else torch.where(is_own[:, None], rows, y[tokens])

    def score(self, hidden: Tensor, logits: Tensor, rows: Tensor) -> None:
        """Write the own logits of ``hidden`` [S, H] to ``logits`` [S, V], only for some ``rows`` [n]."""
        packed = self.own.packed
        assert packed is not None
        scores = linear(hidden[rows], packed, torch.float32)
        if self.ids is not None:
            logits[rows[:, None], self.ids] = scores
            return
        logits[rows, : self.size] = scores
        logits[rows, self.size :] = -torch.inf


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """An adapter's weights that replace the base model's, in the base model's type.

    Attributes:
        vocab_size: number of tokens of the adapter's vocabulary; None for the base model's.
        score: [classes, H] fp32, a classification head.
    """

    embedding: TokenPart | None = None
    head: TokenPart | None = None
    norms: Mapping[str, NormWeights] = field(default_factory=dict)
    vocab_size: int | None = None
    score: Tensor | None = None

    @property
    def matrices(self) -> tuple[OwnRows, ...]:
        """Rows of embedding and head, each once."""
        parts = (part.own for part in (self.embedding, self.head) if part is not None)
        return tuple({own.key: own for own in parts}.values())

    @property
    def num_bytes(self) -> int:
        """Size of all own weights in bytes."""
        score = 0 if self.score is None else self.score.nbytes
        return score + sum(own.num_bytes for own in self.matrices) + sum(each.nbytes for each in self._of_norms)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the own weights."""
        ids = (part.ids for part in (self.embedding, self.head) if part is not None)
        found = (*(own.tensor for own in self.matrices), *ids, *self._of_norms, self.score)
        return [each for each in found if each is not None]

    @property
    def _of_norms(self) -> list[Tensor]:
        return [each for norm in self.norms.values() for each in (norm.weight, norm.bias) if each is not None]

    @property
    def has_matrix(self) -> bool:
        """Whether the adapter has a whole embedding or head, which needs far more memory than LoRA."""
        return any(part is not None and part.ids is None for part in (self.embedding, self.head))

    def map(self, move: Callable[[Tensor], Tensor], move_rows: Callable[[OwnRows], OwnRows]) -> OwnWeights:
        """Return a copy in which all tensors are moved."""

        def part(old: TokenPart | None) -> TokenPart | None:
            return old and TokenPart(move_rows(old.own), None if old.ids is None else move(old.ids))

        norms = {
            name: NormWeights(*(None if each is None else move(each) for each in (norm.weight, norm.bias)))
            for name, norm in self.norms.items()
        }
        score = None if self.score is None else move(self.score)
        return replace(self, embedding=part(self.embedding), head=part(self.head), norms=norms, score=score)


@dataclass(frozen=True, slots=True)
class OwnStep:
    """Own weights of the adapters of one step.

    Attributes:
        parts: for each adapter with own weights the indices [n] of its tokens, or of its rows of hidden states, and its
            weights.
        count: number of tokens or rows of the step.
    """

    parts: Sequence[tuple[Tensor, OwnWeights]]
    count: int

    @property
    def has_norms(self) -> bool:
        return any(own.norms for _, own in self.parts)

    @property
    def needs_head(self) -> bool:
        """Whether logits of the model's own head are needed: for a row whose adapter has no whole head."""
        return sum(len(rows) for rows, own in self.parts if own.head is not None and own.head.ids is None) < self.count

    @property
    def changes_hidden(self) -> bool:
        """Whether own weights change the hidden states, and not only the logits."""
        return any(own.norms or own.embedding for _, own in self.parts)

    def norms(self, name: str) -> list[tuple[Tensor, NormWeights]]:
        """Return the own weights of a norm, each with the indices of its tokens."""
        return [(tokens, own.norms[name]) for tokens, own in self.parts if name in own.norms]

    def embed(self, token_ids: Tensor, y: Tensor) -> None:
        """Write the own rows of ``token_ids`` [T] to the embedding ``y`` [T, H], before it is scaled."""
        for tokens, own in self.parts:
            if own.embedding is not None:
                own.embedding.embed(token_ids, y, tokens)

    def logits(self, hidden: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits [S, V] fp32 of ``hidden`` [S, H].

        V is the largest vocabulary. ``base``: the model's own logits.
        """
        heads = [(rows, own.head) for rows, own in self.parts if own.head is not None]
        width = max((head.size for _, head in heads if head.ids is None), default=0)
        if not self.needs_head:
            logits = hidden.new_empty((self.count, width), dtype=torch.float32)
        else:
            logits = base(hidden)
            if width > logits.shape[1]:
                wide = logits.new_full((self.count, width), -torch.inf)
                wide[:, : logits.shape[1]] = logits
                logits = wide
        for rows, head in heads:
            head.score(hidden, logits, rows)
        return logits

    def best(self, hidden: Tensor) -> Largest | None:
        """Return the largest logit of each row if all rows belong to one adapter with a whole head; else None."""
        if len(self.parts) != 1 or self.count != len(self.parts[0][0]):
            return None
        head = self.parts[0][1].head
        if head is None or head.ids is not None or head.own.packed is None:
            return None
        return largest_linear(hidden, head.own.packed)
