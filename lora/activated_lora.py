"""Activated LoRA (https://arxiv.org/abs/2504.12397): finds the position at which the adapter is activated.

Tokens before the adapter's invocation sequence run on the base model and share its KV; from the first token of the
invocation sequence on, tokens run with the adapter.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


def activation_position(prompt: array[int], invocation: Sequence[int]) -> int | None:
    """Return the index of the last occurrence of ``invocation`` in ``prompt``, both token ids; None if the prompt does
    not contain it.

    None means that the whole request runs on the base model. The index counts from the beginning of the submitted
    prompt; chunks, preemption and generated tokens do not change it.
    """
    wanted, width = array(prompt.typecode, invocation).tobytes(), prompt.itemsize
    data = prompt.tobytes()
    found = data.rfind(wanted)
    # The bytes match at an offset inside a token, or there is no match: -1 % width is positive, too.
    while found % width > 0:
        if found < 0:
            return None
        found = data.rfind(wanted, 0, found + len(wanted) - 1)
    return found // width
