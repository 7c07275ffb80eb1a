"""What ``LLM.beam_search`` returns, by vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..serving.beams import BeamSearch, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence", "outputs_of"]


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best sequences of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def outputs_of(search: BeamSearch, decoders: Sequence[Callable[[list[int]], str]]) -> list[BeamSearchOutput]:
    """Return the best sequences of each prompt, their texts by its decoder."""
    found = []
    for best, decode in zip(search.best(), decoders, strict=True):
        for beam in best:
            beam.text = decode(beam.tokens)
            beam.finish_reason = beam.finish_reason or "length"
        found.append(BeamSearchOutput(best))
    return found
