"""Sampling options: the numeric parameters of a draw, each a row of one table.

These are generated from a row: the field in ``SamplingParams``, in ``SamplingDefaults`` and in every protocol that
generates text; the check of the bounds; the key by which a model's publisher may recommend a value; the rows in
``docs/reference/api.md``. A new option needs a row here, its computation (``engine.sampling.top_k_top_p``) and a column
in ``kernels.layouts.draw_params``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

MAX_TOP_K = 1 << 20


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """A row of the table.

    Attributes:
        neutral: the value for requests and models that set none; with it the option has no effect.
        low, high: bounds, both inclusive unless ``is_above_low``.
        about: description of the option for people.
        aliases: other values that mean the neutral one.
        recommended: whether a publisher's ``generation_config.json`` may name it.
        gguf: the last part of its key in a GGUF file, ``general.sampling.KEY``; "" for none.
    """

    name: str
    kind: type[int] | type[float]
    neutral: int | float
    low: float
    high: float
    about: str
    is_above_low: bool = False
    aliases: tuple[int, ...] = ()
    recommended: bool = False
    gguf: str = ""


def _row(neutral: int | float, low: float, high: float, about: str, **more: Any) -> Any:
    return field(default=neutral, metadata={"neutral": neutral, "low": low, "high": high, "about": about, **more})


@dataclass(frozen=True, slots=True)
class SamplingNumbers:
    """The table: one field for each option."""

    temperature: float = _row(1.0, 0, 2, "divides the logits; 0 is greedy", recommended=True, gguf="temp")
    top_p: float = _row(
        1.0,
        0,
        1,
        "keeps the likeliest tokens, of those that `top_k` keeps, until they reach this share",
        is_above_low=True,
        recommended=True,
        gguf="top_p",
    )
    top_k: int = _row(
        0,
        0,
        MAX_TOP_K,
        "keeps the k likeliest tokens, and ties of the last; 0 and -1 are off",
        aliases=(-1,),
        recommended=True,
        gguf="top_k",
    )
    min_p: float = _row(
        0.0,
        0,
        1,
        "keeps, of those that `top_p` keeps, tokens with this part of the likeliest one's probability; 0 is off",
        recommended=True,
        gguf="min_p",
    )
    top_n_sigma: float = _row(
        0.0,
        -1000,
        1000,
        "keeps, before all other filters, logits within so many standard deviations of the largest; 0 and below is off",
    )
    presence_penalty: float = _row(0.0, -2, 2, "is subtracted from the logits of tokens that the answer has")
    frequency_penalty: float = _row(0.0, -2, 2, "is subtracted for each time that the answer has the token")
    repetition_penalty: float = _row(
        1.0,
        0,
        2,
        "divides the positive logits of tokens in prompt and answer, and multiplies the negative ones",
        is_above_low=True,
        recommended=True,
        gguf="penalty_repeat",
    )


# Annotations are text in this module.
_KINDS = {"int": int, "float": float}
OPTIONS: tuple[SamplingOption, ...] = tuple(
    SamplingOption(each.name, _KINDS[str(each.type)], **each.metadata) for each in fields(SamplingNumbers)
)
_ALIASES = {option.name: option for option in OPTIONS if option.aliases}


def without_aliases(name: str, value: Any) -> Any:
    """Return the value of an option, or the neutral one for an alias of it; values of other fields as they are."""
    option = _ALIASES.get(name)
    return option.neutral if option is not None and value in option.aliases else value
