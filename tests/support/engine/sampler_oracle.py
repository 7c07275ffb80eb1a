"""The sampler's chain written plainly, one row at a time, in numpy; and requests as tests describe them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from rootgraft.engine.batch import Row, RowStart
from rootgraft.engine.sampling.sampler import DeviceMasks
from rootgraft.engine.types import SamplingParams

EPS = 1e-5  # what float32 probabilities may be off


@dataclass(frozen=True)
class Request:
    params: SamplingParams
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    seed: int = 0
    allowed: tuple[bool, ...] | None = field(default=None)

    def start(self, row: int, drawn: tuple[int, ...] = ()) -> RowStart:
        tokens = (*self.prompt, *self.generated, *drawn)
        return RowStart(row, self.params, tokens, len(self.prompt), self.stops, self.seed)


def step(row: int, num_generated: int) -> Row:
    return Row(row, 0, (), 0, (), draws=True, num_generated=num_generated)


def packed(allowed: list[tuple[bool, ...] | None], vocab: int, device: str = "cpu") -> DeviceMasks | None:
    """The masks of the rows of booleans that are not None; None if all are."""
    lines = [line for line, row in enumerate(allowed) if row is not None]
    if not lines:
        return None
    bits = np.zeros((len(lines), -(-vocab // 32) * 32), np.uint8)
    bits[:, :vocab] = [row for row in allowed if row is not None]
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    return DeviceMasks(torch.tensor(lines, device=device), words.to(device))


def edited(logits: np.ndarray, request: Request) -> np.ndarray:
    """Mask, allowed tokens, bias, penalties, min_tokens, bad words; float32."""
    params, out = request.params, logits.astype(np.float32)
    for token in range(len(out)):
        if request.allowed is not None and not request.allowed[token]:
            out[token] = -np.inf
    for token in range(len(out)):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            out[token] = -np.inf
    for token, bias in params.logit_bias:
        out[token] += np.float32(bias)
    for token in {*request.prompt, *request.generated}:
        penalty = np.float32(params.repetition_penalty)
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        count = request.generated.count(token)
        out[token] -= np.float32(params.frequency_penalty * count + params.presence_penalty * (count > 0))
    if len(request.generated) < params.min_tokens:
        for token in request.stops:
            out[token] = -np.inf
    for *before, last in params.bad_words:
        if tuple(before) == request.generated[max(0, len(request.generated) - len(before)) :]:
            out[last] = -np.inf
    return out


def _softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    exps = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return exps / exps.sum()


def kept(logits: np.ndarray, params: SamplingParams, top_p: float, min_p: float) -> list[int]:
    """The kept tokens by (probability, id), likeliest first."""
    probs = _softmax(logits, params.temperature)
    ids = sorted((token for token in range(len(logits)) if logits[token] > -np.inf), key=lambda t: (-logits[t], t))
    if 0 < params.top_k < len(ids):
        ids = [token for token in ids if logits[token] >= logits[ids[params.top_k - 1]]]
    mass, total, nucleus = 0.0, sum(probs[token] for token in ids), []
    for token in ids:
        if nucleus and params.top_p < 1 and mass >= top_p * total:
            break
        nucleus.append(token)
        mass += probs[token]
    return [token for token in nucleus if probs[token] >= min_p * probs[ids[0]]]


def readings(logits: np.ndarray, params: SamplingParams, slack: float = EPS) -> Iterator[tuple[list[int], np.ndarray]]:
    """Kept tokens in the order of the draw and their probabilities, for thresholds a rounding error up and down."""
    probs = _softmax(logits, params.temperature)
    by_id = params.top_p >= 1 and (params.top_k == 0 or params.top_k >= len(logits))
    for top_p in {params.top_p, params.top_p * (1 - slack), min(params.top_p * (1 + slack), 1.0)}:
        for min_p in {params.min_p, params.min_p * (1 - slack), params.min_p * (1 + slack)}:
            ids = kept(logits, params, top_p, min_p)
            ids = sorted(ids) if by_id else ids
            yield ids, probs[ids] / probs[ids].sum()


def may_draw(token: int, u: float, logits: np.ndarray, params: SamplingParams, slack: float = EPS) -> bool:
    """Whether the inverse of the cumulated probabilities takes ``u`` to ``token``, up to rounding."""
    for ids, probs in readings(logits, params, slack):
        if token in ids:
            place = ids.index(token)
            if probs[:place].sum() - slack <= u <= probs[: place + 1].sum() + slack:
                return True
    return False


def may_win(token: int, noise: np.ndarray, logits: np.ndarray, params: SamplingParams, slack: float = EPS) -> bool:
    """Whether ``token`` wins the races of a draw from all tokens, up to rounding: of 2,048, of 64, of single ones.

    Args:
        noise: exponential random numbers of the 64 places in a block, of the 32 in a part, and of the parts.
    """
    for ids, probs in readings(logits, params, slack):
        if token not in ids:
            continue
        kept, won = np.array(ids), True
        for size, first in ((2048, 96), (64, 64), (1, 0)):
            runners = np.unique(kept // size)
            places = runners if size == 2048 else runners % (32 if size == 64 else 64)
            shares = [probs[kept // size == runner].sum() for runner in runners] / noise[first + places]
            won &= bool(shares[runners == token // size] >= shares.max() * (1 - 100 * slack))
            probs, kept = probs[kept // size == token // size], kept[kept // size == token // size]
        if won:
            return True
    return False
