"""Routing: the replica for a sequence, by cached prefix, expected wait and adapters. A pure function.

    score = 1.5 to 4.5 x prefill tokens saved + home bonus - expected wait in tokens - load of the adapter in tokens

All terms are in tokens of prefill. The factor of the tokens saved is 1.5 while a replica is idle, and grows with the
least wait of all replicas. The *home* of a prompt is chosen by rendezvous hashing of the first block that no
replica has. Prompts that share this block get the same home on every gateway, while prompts that branch after a known
prefix get different homes. A replica that is the home of many prompts would be overloaded if they all had to go there.
So the bonus is worth at most a part of the prompt: if the wait at home is longer, the second choice of the hash is
used, and then any free replica. Each sequence is decided separately, so an overloaded replica does not affect the
sequences of other replicas.

An adapter's sequences are sent to the replicas that have the adapter loaded, unless they would wait there longer than a
load on another replica takes. An adapter that must be loaded is loaded on a replica with a free slot and the fewest
recent sequences, so that adapters with much load are placed beside adapters with little load. While there are free
slots, the number of replicas with an adapter is its share of the load times the number of replicas, rounded up.
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
"""Worth of a cached token in tokens of wait. It is above 1, because computing a token again delays other sequences.

With 1, the branches of one prompt, arriving together, are spread over too many replicas. With 2, a program that has the
whole fleet for itself takes a tenth longer (``benchmarks/fleet/simulated/hit_rates.py``).
"""

BUSY_WORTH = 3.0
"""Limit of the worth that is added to ``SAVED_WORTH`` if all replicas are busy: the least wait divided by the prompt.

While a replica is idle, computing a prefix again there delays nobody. If all replicas have work, it delays others.
"""

HOME_PART = 0.1
"""Bonus of the first home, as a part of the prompt's tokens that no replica has; the second home gets half of it."""

LEAST_HOME = 16.0
"""Least bonus of the first home, in tokens, so that prompts shorter than a block have a home too."""

FULL_SLOTS = 4.0
"""Factor of the cost of loading an adapter where it replaces another one, which will have to be loaded again too."""

EVEN_LOADS = 1.0
"""Cost, in loads of an adapter, of a replica that got the mean number of recent sequences while another got none."""

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


@dataclass(frozen=True, slots=True)
class ReplicaColumns:
    """All replicas, one at each index of these arrays.

    Attributes:
        names: hashes of the replicas' names.
        open: whether each replica takes new sequences.
        wait: tokens of prefill for which a new sequence waits, at the fleet's mean rate.
    """

    names: Hashes
    open: Flags
    wait: Floats


@dataclass(frozen=True, slots=True)
class AdapterColumns:
    """All replicas with respect to one adapter, one at each index of these arrays.

    Attributes:
        loaded: whether the replica holds the adapter.
        full: whether the replica holds as many adapters as it has slots.
        load_tokens: number of prefill tokens computed in the time of a load.
        share: the adapter's part of the fleet's load, 0 to 1.
        busy: number of recent sequences of each replica, divided by their mean.
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
        replica: index of the replica; -1 if none takes new sequences.
        num_cached: number of tokens that it probably has in its prefix cache.
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
        adapter: data of the adapter; None for the base model.
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
    """Return the rank of each replica for a key, highest first: equal on every gateway (splitmix64's finalizer)."""
    x = names ^ np.uint64(key)
    for shift, factor in zip(_SHIFTS, _MIX, strict=False):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> _SHIFTS[2])


def _load_costs(adapter: AdapterColumns, is_open: Flags) -> Floats:
    """Return the cost of loading an adapter on each replica, in tokens."""
    wanted = math.ceil(adapter.share * int(is_open.sum()) - 1e-9)
    lacks = int((adapter.loaded & is_open).sum()) < max(1, wanted)
    loads = np.where(adapter.full, FULL_SLOTS, 0.0 if lacks else 1.0)
    costs: Floats = adapter.load_tokens * (loads + EVEN_LOADS * (adapter.busy - adapter.busy[is_open].min()))
    return costs


def _with_bonus(score: Floats, ranks: Hashes, is_open: Flags, worth: float) -> Floats:
    """Add the bonus of the first and the second home; replicas that are not open get minus infinity."""
    score = np.where(is_open, score, -np.inf)
    ranked = np.where(is_open, ranks, np.uint64(0))
    for bonus in (worth, worth / 2):
        home = int(ranked.argmax())
        if not ranked[home]:
            break
        score[home] += bonus
        ranked[home] = 0
    return score
