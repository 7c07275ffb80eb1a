"""The scheduler is the only module that writes sequences, and a matcher is reached through its owner alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from rootgraft.engine.sequence.guarded_matcher import GuardedMatcher
from rootgraft.engine.sequence.sequence import Sequence, SequenceCounts, SequenceSpec

ENGINE = Path(__file__).parents[3] / "engine"
FIELDS = {each.name for record in (Sequence, SequenceSpec, SequenceCounts) for each in fields(record)}
CHANGES = {"append", "extend", "insert", "pop", "remove", "clear", "reverse", "sort"}  # of ``tokens``
WRITER = "scheduling/scheduler.py"


def modules_that_know_sequences() -> Iterator[str]:
    for path in sorted(ENGINE.rglob("*.py")):
        names = {each.id for each in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(each, ast.Name)}
        if "Sequence" in names and "sequence import Sequence" in path.read_text("utf-8"):
            yield path.relative_to(ENGINE).as_posix()


def attribute_writes(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Attributes of anything but ``self`` that are assigned, deleted or, as lists, changed in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            written: ast.expr = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            written = node.func.value
        else:
            continue
        if isinstance(written, ast.Attribute) and not (
            isinstance(written.value, ast.Name) and written.value.id == "self"
        ):
            yield written


@pytest.mark.parametrize("name", list(modules_that_know_sequences()))
def test_only_the_scheduler_writes_sequences(name: str) -> None:
    writes = [each for each in attribute_writes(ast.parse((ENGINE / name).read_text("utf-8"))) if each.attr in FIELDS]
    own = {"scheduling/waiting_queue.py": {"entry.priority"}, "core/kv_exports.py": {"export.path", "export.tokens"}}
    others = own.get(name, set())  # of its own entries
    written = {ast.unparse(each) for each in writes} - others
    assert bool(written) == (name == WRITER), written


def test_the_search_finds_modules_and_writes() -> None:
    assert {WRITER, "scheduling/waiting_queue.py", "sequence/stop_check.py"} <= set(modules_that_know_sequences())
    found = attribute_writes(ast.parse("a.x, b.y = 1, 2\nc.z += 1\nd.tokens.append(1)\nself.w = 1"))
    assert {ast.unparse(each) for each in found} == {"a.x", "b.y", "c.z", "d.tokens"}


def test_only_the_owner_and_the_filler_of_masks_reach_a_matcher() -> None:
    reached = set()
    for path in ENGINE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "lent":
                reached.add(path.relative_to(ENGINE).as_posix())
    assert reached == {"core/structured_output.py"}


class FakeThread:
    def submit(self, work, *args):
        self.work = work, args
        self.filling = Filling()
        return self.filling


class Filling:
    is_done = False

    def done(self) -> bool:
        return self.is_done

    def cancel(self) -> None:
        self.is_done = True


class FakeMatcher:
    num_tokens, num_shortest = 3, 7

    def prepare(self, remaining: int) -> None: ...

    def accept(self, token: int) -> bool:
        return token == 1


def test_a_matcher_has_one_user_at_a_time() -> None:
    guarded, thread = GuardedMatcher(FakeMatcher()), FakeThread()  # type: ignore[arg-type]
    assert guarded.accept(1) and not guarded.accept(2)
    guarded.fill_ahead(thread, 9)  # type: ignore[arg-type]
    assert guarded.is_filling_ahead and thread.work[1] == (9,)
    lending = Filling()
    for call in (lambda: guarded.accept(1), lambda: guarded.is_slow(9), lambda: guarded.lend(lending)):  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="in use on another thread"):
            call()
    assert guarded.num_shortest == 7
    guarded.cancel()
    guarded.lend(lending)  # type: ignore[arg-type]
    assert not guarded.is_filling_ahead and guarded.lent is not None
    with pytest.raises(RuntimeError, match="in use on another thread"):
        guarded.accept(1)
    lending.is_done = True
    assert guarded.accept(1)
