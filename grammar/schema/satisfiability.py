"""Whether a finite value exists for each part of a schema, and how many bytes the shortest one takes at least."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

from .constraints import (
    ALWAYS,
    ARRAY,
    FALSE,
    NULL,
    NUMBER,
    OBJECT,
    STRING,
    TRUE,
    Alternative,
    Arrays,
    Conj,
    Objects,
    Strings,
)

if TYPE_CHECKING:
    from .analysis import Analysis


class Satisfiability:
    """The least size of every conjunction that a schema can reach, as a least fixed point.

    A conjunction whose size stays infinite has no finite value: a recursion without end, or a part that nothing
    satisfies.
    """

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._sizes: dict[Conj, float] = {ALWAYS: 1}
        # Of which the size is final, and whether the last one worked out rests on any that is not.
        self._settled: set[Conj] = {ALWAYS}
        self._guessed = False
        self._live: dict[Conj, list[Alternative]] = {}

    def explore(self, root: Conj) -> None:
        """Find everything that is reachable and settle its size."""
        order: list[Conj] = []
        seen, todo = set(self._sizes), [root]
        while todo:
            conj = todo.pop()
            if conj in seen:
                continue
            seen.add(conj)
            order.append(conj)
            for alternative in self._analysis.conjunction(conj):
                todo += _children(alternative)
        order.reverse()
        changed = True
        while changed:
            changed = sum(map(self._resize, order)) > 0
            order = [conj for conj in order if conj not in self._settled]
        self._sizes |= {conj: inf for conj in seen if conj not in self._sizes}
        self._settled |= seen

    def _resize(self, conj: Conj) -> bool:
        """Whether the size of a conjunction becomes smaller by what is known now."""
        self._guessed = False
        size = min(map(self._world, self._analysis.conjunction(conj)), default=inf)
        if not self._guessed:
            self._settled.add(conj)
        if size < self._sizes.get(conj, inf):
            self._sizes[conj] = size
            return True
        return False

    def size(self, conj: Conj) -> float:
        """Bytes of the shortest value, at least; infinite if there is none."""
        known = self._sizes.get(conj)
        if known is None:
            if -1 in conj:
                return inf
            self.explore(conj)
            known = self._sizes[conj]
        return known

    def possible(self, conj: Conj) -> bool:
        """Whether a finite value exists."""
        return self.size(conj) < inf

    def reachable(self) -> list[Conj]:
        """Everything that was found to have a finite value."""
        return [conj for conj, size in self._sizes.items() if size < inf]

    def live(self, conj: Conj) -> list[Alternative]:
        """The worlds of a conjunction that have a finite value; its size must have been asked for."""
        known = self._live.get(conj)
        if known is None:
            alternatives = self._analysis.conjunction(conj)
            known = self._live[conj] = [alternative for alternative in alternatives if self._world(alternative) < inf]
        return known

    def array_possible(self, arrays: Arrays) -> bool:
        """Whether a finite array exists."""
        return self._array(arrays) < inf

    def object_possible(self, objects: Objects) -> bool:
        """Whether a finite object exists."""
        return self._object(objects) < inf

    def _world(self, alternative: Alternative) -> float:
        sizes = [inf]
        if alternative.types & (NULL | TRUE | FALSE):
            sizes.append(4)
        if alternative.types & NUMBER:
            sizes.append(1)
        if alternative.types & STRING:
            sizes.append(2 + _string(alternative.strings))
        if alternative.types & ARRAY:
            sizes.append(self._array(alternative.arrays))
        if alternative.types & OBJECT:
            sizes.append(self._object(alternative.objects))
        return min(sizes)

    def _known(self, conj: Conj) -> float:
        if -1 in conj:
            return inf
        self._guessed = self._guessed or conj not in self._settled
        return self._sizes.get(conj, inf)

    def _array(self, arrays: Arrays) -> float:
        size = 2.0
        for index in range(min(arrays.least, arrays.num_prefix)):
            size += self._known(arrays.item(index)) + 1
        if arrays.least > arrays.num_prefix:
            size += (arrays.least - arrays.num_prefix) * (self._known(arrays.item(arrays.num_prefix)) + 1)
        needed = [entry.item for entry in arrays.contains if entry.least]
        return inf if any(-1 in conj for conj in needed) else size

    def _object(self, objects: Objects) -> float:
        size = 2.0
        for name in objects.required:
            if not self._analysis.admits_name(objects.names, name):
                return inf
            size += len(name) + 4 + self._known(objects.value(name))
        return size


def _string(strings: Strings) -> float:
    if strings.values is not None:
        return min(map(len, strings.values), default=inf)
    return strings.least


def _children(alternative: Alternative) -> Iterator[Conj]:
    if alternative.types & ARRAY:
        for index in range(alternative.arrays.num_prefix + 1):
            yield alternative.arrays.item(index)
        for entry in alternative.arrays.contains:
            yield alternative.arrays.item(alternative.arrays.num_prefix) | entry.item
            yield alternative.arrays.item(alternative.arrays.num_prefix) | entry.negated
    if alternative.types & OBJECT:
        for name in alternative.objects.declared():
            conj = alternative.objects.value(name)
            if -1 not in conj:
                yield conj
        yield ALWAYS.union(*(clause.rest or ALWAYS for clause in alternative.objects.clauses))
