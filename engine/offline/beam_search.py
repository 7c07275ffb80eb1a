"""Beam search for ``LLM.beam_search``: runs the search step by step, and builds its outputs under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ..serving.beams import BeamRules, BeamSearch, BeamSearchSequence
from .running_request import ProgressBar

__all__ = ["BeamSearchOutput", "BeamSearchSequence", "outputs_of", "search_beams"]


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best sequences of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def search_beams(
    rules: BeamRules,
    prompts: Sequence[list[int]],
    ends: Sequence[Collection[int]],
    scores: Callable[[Sequence[tuple[int, BeamSearchSequence]], int], Sequence[Mapping[int, float]]],
    *,
    use_tqdm: bool,
) -> BeamSearch:
    """Run a beam search to its end: until no beam can be continued, or all beams have the largest number of tokens.

    Args:
        prompts: tokens of each prompt.
        ends: end tokens for each prompt.
        scores: computes the logprobs of next tokens. Its arguments are beams, each with the index of its prompt, and a
            number of tokens; its result holds that number of likeliest tokens for each beam.
        use_tqdm: whether to show a progress bar of the steps.

    Raises:
        RequestError: a parameter is out of bounds.
    """
    search = BeamSearch(rules, prompts, ends)
    progress = ProgressBar(rules.max_tokens, shown=use_tqdm)
    try:
        for count in range(rules.max_tokens):
            beams = search.live()
            if not beams:
                break
            search.advance(scores(beams, search.num_candidates))
            progress.update(count + 1, count + 1)
    finally:
        progress.close()
    return search


def outputs_of(search: BeamSearch, decoders: Sequence[Callable[[list[int]], str]]) -> list[BeamSearchOutput]:
    """Return the best sequences of each prompt, with texts from the prompt's decoder."""
    found = []
    for best, decode in zip(search.best(), decoders, strict=True):
        for beam in best:
            beam.text = decode(beam.tokens)
            beam.finish_reason = beam.finish_reason or "length"
        found.append(BeamSearchOutput(best))
    return found
