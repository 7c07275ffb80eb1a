"""Where an activated LoRA begins to work (https://arxiv.org/abs/2504.12397).

Such an adapter leaves all tokens before its invocation sequence to the base model, whose KV they share; from the first
token of the sequence on, everything is the adapter's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


def activation_position(prompt: array[int], invocation: Sequence[int]) -> int | None:
    """Index of the last occurrence of ``invocation`` in ``prompt``, both token ids; None if there is none.

    None means that the whole request is the base model's. The position belongs to the prompt as it was submitted: it
    stays the same through chunks, preemption and all that is generated.
    """
    wanted, width = array(prompt.typecode, invocation).tobytes(), prompt.itemsize
    data = prompt.tobytes()
    found = data.rfind(wanted)
    while found % width > 0:  # bytes of two neighbours; -1 % width > 0 too
        if found < 0:
            return None
        found = data.rfind(wanted, 0, found + len(wanted) - 1)
    return found // width
