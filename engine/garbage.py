"""How Python's collector is set up in a process that serves."""

from __future__ import annotations

import gc


def freeze() -> None:
    """Have the collector leave alone what is there now: the objects of libraries and tokenizer, hundreds of thousands.

    To be called once all is loaded. A full collection looks at every object, so with these it would stop the process
    for a tenth of a second; and as it waits until a quarter as many new ones are there as it left the last time, so
    would megabytes of garbage, and the tuples that Python keeps for reuse until then. Hence the second collection: it
    leaves none.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
