"""Routing: the replica for a sequence, by cached prefix, expected wait and adapters. A pure function of its arguments.

    score = 1.5 to 4.5 x prefill tokens saved + home bonus - expected wait in tokens - load of the adapter in tokens

All terms are tokens of prefill. The *home* of a prompt is drawn by rendezvous hash from the first block that no replica
has: prompts that will have it in common meet there, whichever gateway they come through, and branches of one known
prefix spread. As one home in a fleet would be a hot spot, its bonus is worth no more than a part of the prompt: a wait
that is longer goes to the second choice, and then to whoever is free. Each sequence is decided by itself: one hot
replica changes nothing for the others.

An adapter's sequences go to who has it loaded, as long as others are not idle for longer than a load takes. One that
is to be loaded goes where there is a free slot and where the fewest sequences went lately, so that those with most of
the load come to stand beside those with least; it is loaded on as many replicas as its share of the load, rounded up,
as long as there are free slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .prefix_chain import BLOCK

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]

SAVED_WORTH = 1.5
"""What a cached token is worth in tokens of wait: one that is computed again keeps others waiting too.

Where it is 1, branches of a prompt that come at once spread too far; where it is 2, a program that has the fleet to
itself takes a tenth longer (``benchmarks/fleet/simulated/hit_rates.py``).
"""

BUSY_WORTH = 3.0
"""What it is worth more at most where all replicas are busy: as many times as the prompt fits in the least wait.

While one is idle, computing a prefix again there costs nobody anything; where all have work, it is work for all.
"""

HOME_PART = 0.1
"""What a first home is worth, as a part of the prompt's tokens; a second home is worth half of that."""

LEAST_HOME = 16.0
"""What a home is worth at least, in tokens: prompts shorter than a block have homes too."""

FULL_SLOTS = 4.0
"""Factor of an adapter's load where another adapter has to leave: that will be loaded again too."""

EVEN_LOADS = 1.0
"""What it costs, in loads of an adapter, that a replica got the mean of the sequences lately and another one none."""

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


@dataclass(frozen=True, slots=True)
class ReplicaColumns:
    """All replicas, one in each place of these arrays.

    Attributes:
        names: hashes of their names.
        open: takes new sequences.
        wait: tokens of prefill that a new sequence waits for, by the fleet's mean rate.
    """

    names: Hashes
    open: Flags
    wait: Floats


@dataclass(frozen=True, slots=True)
class AdapterColumns:
    """All replicas with respect to one adapter, one in each place of these arrays.

    Attributes:
        loaded: holds it.
        full: holds as many adapters as it has slots.
        load_tokens: tokens of prefill in the time of a load.
        share: part of the fleet's load that it has, 0 to 1.
        busy: sequences that each replica got lately, as a part of their mean.
    """

    loaded: Flags
    full: Flags
    load_tokens: float
    share: float
    busy: Floats


@dataclass(frozen=True, slots=True)
class Route:
    """The choice for a sequence.

    Attributes:
        replica: its index; -1 if none takes new sequences.
        num_cached: tokens that it is likely to have in its prefix cache.
    """

    replica: int
    num_cached: int = 0


def choose_replica(
    chain: Sequence[int],
    num_tokens: int,
    cached: npt.NDArray[np.intp],
    deepest: int,
    replicas: ReplicaColumns,
    adapter: AdapterColumns | None = None,
) -> Route:
    """Return the replica for a sequence of ``num_tokens`` tokens; equal scores go to the better home.

    Args:
        chain: see ``prefix_chain``.
        cached, deepest: see ``PrefixIndex.cached``.
        adapter: None for the base model.
    """
    if not replicas.open.any():
        return Route(-1)
    least_wait = float(replicas.wait[replicas.open].min())
    score = (SAVED_WORTH + min(BUSY_WORTH, least_wait / num_tokens)) * cached - replicas.wait
    ranks = rendezvous(chain[min(deepest + 1, len(chain) - 1)], replicas.names)
    if adapter is not None:
        score = score - np.where(adapter.loaded, 0.0, _load_costs(adapter, replicas.open))
        if (loaded := adapter.loaded & replicas.open).any():
            ranks = np.where(loaded, ranks, np.uint64(0))
    worth = max(LEAST_HOME, HOME_PART * (num_tokens - deepest * BLOCK))
    score = _with_bonus(score, ranks, replicas.open, worth)
    best = np.flatnonzero(score == score.max())
    choice = int(best[np.argmax(ranks[best])])
    return Route(choice, min(int(cached[choice]), num_tokens))


def rendezvous(key: int, names: Hashes) -> Hashes:
    """Return the rank of each replica for a key, highest first: the same on every gateway (splitmix64's finalizer)."""
    x = names ^ np.uint64(key)
    for shift, factor in zip(_SHIFTS, _MIX, strict=False):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> _SHIFTS[2])


def _load_costs(adapter: AdapterColumns, is_open: Flags) -> Floats:
    """Return what it costs to load an adapter on each replica, in tokens."""
    wanted = math.ceil(adapter.share * int(is_open.sum()) - 1e-9)
    lacks = int((adapter.loaded & is_open).sum()) < max(1, wanted)
    loads = np.where(adapter.full, FULL_SLOTS, 0.0 if lacks else 1.0)
    costs: Floats = adapter.load_tokens * (loads + EVEN_LOADS * (adapter.busy - adapter.busy[is_open].min()))
    return costs


def _with_bonus(score: Floats, ranks: Hashes, is_open: Flags, worth: float) -> Floats:
    """Add the bonus of the first and the second home; who is not open gets minus infinity."""
    score = np.where(is_open, score, -np.inf)
    ranked = np.where(is_open, ranks, np.uint64(0))
    for bonus in (worth, worth / 2):
        home = int(ranked.argmax())
        if not ranked[home]:
            break
        score[home] += bonus
        ranked[home] = 0
    return score
