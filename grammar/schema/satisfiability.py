"""Satisfiability of each part of a schema, with a lower bound on the bytes of its shortest finite value."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from .constraints import ALWAYS, Alternative, Arrays, Conj, Objects, Strings
from .json_types import ARRAY, BOOLEAN, NULL, NUMBER, OBJECT, STRING
from .string_language import admits_any
from .subschemas import Subschemas


class Satisfiability:
    """Smallest sizes of the values of all conjunctions that a schema can reach, as a least fixed point.

    A conjunction whose size stays infinite has no finite value: its recursion never ends, or a part is unsatisfiable.
    """

    def __init__(self, analysis: Subschemas) -> None:
        self._analysis = analysis
        self._sizes: dict[Conj, float] = {ALWAYS: 1}
        # Conjunctions with a final size; and whether the last computed size depends on a size that is not final.
        self._final: set[Conj] = {ALWAYS}
        self._provisional = False
        self._satisfiable: dict[Conj, list[Alternative]] = {}

    def explore(self, root: Conj) -> None:
        """Compute the sizes of a conjunction and of all conjunctions that it reaches."""
        order: list[Conj] = []
        seen, todo = set(self._sizes), [root]
        while todo:
            conj = todo.pop()
            if conj in seen:
                continue
            seen.add(conj)
            order.append(conj)
            for alternative in self._analysis.conjunction(conj):
                todo += _parts(alternative)
        order.reverse()
        changed = True
        while changed:
            changed = sum(map(self._resize, order)) > 0
            order = [conj for conj in order if conj not in self._final]
        self._sizes |= {conj: inf for conj in seen if conj not in self._sizes}
        self._final |= seen

    def _resize(self, conj: Conj) -> bool:
        """Recompute a size from those known now. Returns whether it became smaller."""
        self._provisional = False
        size = min(map(self._alternative_size, self._analysis.conjunction(conj)), default=inf)
        if not self._provisional:
            self._final.add(conj)
        if size < self._sizes.get(conj, inf):
            self._sizes[conj] = size
            return True
        return False

    def min_size(self, conj: Conj) -> float:
        """Return a lower bound on the bytes of the shortest value; infinite if there is none."""
        known = self._sizes.get(conj)
        if known is None:
            if -1 in conj:
                return inf
            self.explore(conj)
            known = self._sizes[conj]
        return known

    def is_satisfiable(self, conj: Conj) -> bool:
        return self.min_size(conj) < inf

    def satisfiable(self) -> list[Conj]:
        """Return the conjunctions explored so far that have a finite value."""
        return [conj for conj, size in self._sizes.items() if size < inf]

    def satisfiable_alternatives(self, conj: Conj) -> list[Alternative]:
        """Return the alternatives that have a finite value; the conjunction must have been explored."""
        known = self._satisfiable.get(conj)
        if known is None:
            alternatives = self._analysis.conjunction(conj)
            known = self._satisfiable[conj] = [each for each in alternatives if self._alternative_size(each) < inf]
        return known

    def array_is_satisfiable(self, arrays: Arrays) -> bool:
        return self._array(arrays) < inf

    def object_is_satisfiable(self, objects: Objects) -> bool:
        return self._object(objects) < inf

    def _alternative_size(self, alternative: Alternative) -> float:
        sizes = [inf]
        if alternative.types & (NULL | BOOLEAN):
            sizes.append(4)
        if alternative.types & NUMBER:
            sizes.append(1)
        if alternative.types & STRING and admits_any(alternative.strings):
            sizes.append(2 + _string(alternative.strings))
        if alternative.types & ARRAY:
            sizes.append(self._array(alternative.arrays))
        if alternative.types & OBJECT:
            sizes.append(self._object(alternative.objects))
        return min(sizes)

    def _part_size(self, conj: Conj) -> float:
        if -1 in conj:
            return inf
        self._provisional = self._provisional or conj not in self._final
        return self._sizes.get(conj, inf)

    def _array(self, arrays: Arrays) -> float:
        size = 2.0
        for index in range(min(arrays.least, arrays.num_prefix)):
            size += self._part_size(arrays.item(index)) + 1
        if arrays.least > arrays.num_prefix:
            size += (arrays.least - arrays.num_prefix) * (self._part_size(arrays.item(arrays.num_prefix)) + 1)
        needed = (entry.item for entry in arrays.contains if entry.least)
        return max([size, *(min(map(self._part_size, _places(arrays, conj)), default=inf) for conj in needed)])

    def _object(self, objects: Objects) -> float:
        size = 2.0
        for name in objects.required:
            if not self._analysis.admits_name(objects.names, name):
                return inf
            size += len(name) + 4 + self._part_size(objects.value(name))
        return size


def _string(strings: Strings) -> float:
    if strings.values is not None:
        return min(map(len, strings.values), default=inf)
    return strings.least


def _places(arrays: Arrays, conj: Conj) -> list[Conj]:
    """Return the literals that an item must satisfy so that a condition holds, for each place that it may have."""
    most = arrays.num_prefix + 1 if arrays.most is None else min(arrays.num_prefix + 1, arrays.most)
    return [arrays.item(index) | conj for index in range(most)]


def _parts(alternative: Alternative) -> Iterator[Conj]:
    if alternative.types & ARRAY:
        for index in range(alternative.arrays.num_prefix + 1):
            yield alternative.arrays.item(index)
        for entry in alternative.arrays.contains:
            yield from _places(alternative.arrays, entry.item)
            yield alternative.arrays.item(alternative.arrays.num_prefix) | entry.negated
    if alternative.types & OBJECT:
        for name in alternative.objects.declared():
            conj = alternative.objects.value(name)
            if -1 not in conj:
                yield conj
        yield ALWAYS.union(*(clause.rest or ALWAYS for clause in alternative.objects.clauses))
