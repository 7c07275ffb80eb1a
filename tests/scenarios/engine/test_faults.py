"""A thousand faults of many kinds, seeded: every accepted request ends once, and all equations hold after each."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engine.core_hooks import cache_of, evict_all, scheduler_of
from support.engine.fault_world import FAULTY, NAMES, SPECS, World

from rootgraft.engine.messages import Abort, Shutdown, encode
from rootgraft.grammar.compile.compile_service import CompileQueueFull
from rootgraft.grammar.errors import CompileUnavailable, GrammarError, GrammarTimeout
from rootgraft.grammar.match.matcher import Matcher

INJECTIONS = 1050
KINDS: dict[str, Callable[[World], Any]] = {}


def fault(inject: Callable[[World], Any]) -> Callable[[World], Any]:
    KINDS[inject.__name__] = inject
    return inject


# The device.


@fault
def nan_logits_in_one_row(world: World) -> None:
    world.worker.fail_next = 1


@fault
def nan_logits_in_every_row(world: World) -> None:
    world.worker.fail_next = world.max_num_seqs


@fault
def a_step_raises(world: World) -> None:
    world.worker.raises = RuntimeError("an illegal access")


@fault
def a_step_has_no_memory(world: World) -> None:
    world.worker.raises = MemoryError()


# Pages and the queue.


@fault
def the_tree_is_evicted(world: World) -> None:
    evict_all(world.core)


@fault
def the_pool_is_nearly_full(world: World) -> None:
    """Long answers, all at once: each fits alone, together they do not."""
    for _ in range(6):
        world.ask(max_tokens=40, ignore_eos=True)


@fault
def a_request_as_long_as_the_pool(world: World) -> None:
    world.ask(max_tokens=world.async_engine.max_model_len - 33, ignore_eos=True)


@fault
def a_namespace_is_dropped(world: World) -> None:
    running = scheduler_of(world.core).running
    if running:
        cache_of(world.core).drop(world.rng.choice(running).path.namespace)


@fault
def the_clock_jumps_forward(world: World) -> None:
    world.now += 1e6


@fault
def the_clock_jumps_back(world: World) -> None:
    world.now -= 1e6


# Clients.


@fault
def a_client_leaves_at_once(world: World) -> None:
    reader = world.ask_anything()
    assert reader.task is not None
    reader.left = True
    reader.task.get_loop().call_soon(reader.task.cancel)


@fault
def a_client_leaves_in_the_middle(world: World) -> None:
    world.ask(leaves_after=world.rng.randint(1, 3), n=world.rng.randint(1, 3))


@fault
def an_abort_of_what_never_was(world: World) -> None:
    world.link.abort([10**9])


@fault
def an_abort_comes_twice(world: World) -> None:
    ids = tuple(world.open_ids)
    world.link.abort(ids[:1] * 2)
    for number in ids[:1]:
        next_of(world, number)


@fault
def an_abort_comes_after_the_end(world: World) -> None:
    world.link.abort(list(world.ended)[-3:])


@fault
def the_process_of_the_clients_is_busy(world: World) -> None:
    world.held_frames = 5


@fault
def many_requests_come_at_once(world: World) -> None:
    for _ in range(12):
        world.ask_anything()


@fault
def a_bug_in_the_text_of_one_token(world: World) -> None:
    world.tokenizer.broken.add(world.rng.randrange(256))


# Grammars.


@fault
def a_grammar_is_refused(world: World) -> None:
    world.compiles.errors.append(GrammarError("not", "/not", "cannot be enforced"))
    world.ask(grammar=SPECS[0])


@fault
def a_compile_is_stopped(world: World) -> None:
    world.compiles.errors.append(GrammarTimeout("regex", "", "takes too long"))
    world.ask(grammar=SPECS[1])


@fault
def a_compile_fails_for_no_fault_of_its_grammar(world: World) -> None:
    world.compiles.errors.append(CompileUnavailable("The workers were killed."))
    world.ask(grammar=SPECS[1])


@fault
def the_queue_of_compiles_is_full(world: World) -> None:
    world.compiles.errors.append(CompileQueueFull("full"))
    world.ask(grammar=SPECS[1])


@fault
def compiles_hang(world: World) -> None:
    world.compiles.holding = True
    world.ask(grammar=SPECS[2])
    world.ask(grammar=SPECS[1], leaves_after=1)


@fault
def an_abort_while_a_grammar_compiles(world: World) -> None:
    world.compiles.holding = True
    reader = world.ask(grammar=SPECS[1])
    assert reader.task is not None
    reader.left = True
    reader.task.get_loop().call_later(0, reader.task.cancel)


@fault
def a_matcher_refuses_its_token(world: World) -> None:
    """The mask and the matcher contradict each other: a bug of a library's."""
    world.ask(grammar=FAULTY[0], max_tokens=12)


@fault
def a_grammar_without_a_way_on(world: World) -> None:
    world.ask(grammar=FAULTY[1], max_tokens=12)


# Adapters.


@fault
def an_adapter_is_unknown(world: World) -> None:
    world.ask(adapter="nobody")


@fault
def an_adapter_is_truncated(world: World) -> None:
    path = world.write_adapter("short", 1) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[: world.rng.randint(0, 200)])
    world.ask(adapter="short")


@fault
def an_adapter_cannot_be_read(world: World) -> None:
    folder = world.root / "odd"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").mkdir(exist_ok=True)
    world.ask(adapter="odd")


@fault
def an_adapter_is_no_json(world: World) -> None:
    (world.write_adapter("garbled", 2) / "adapter_config.json").write_bytes(world.rng.randbytes(50))
    world.ask(adapter="garbled")


@fault
def an_adapter_vanishes_from_the_disk(world: World) -> None:
    name = world.rng.choice(NAMES)
    path = world.root / name / "adapter_model.safetensors"
    kept = path.read_bytes()
    path.unlink()
    world.ask(adapter=name)
    world.later.append(lambda: path.write_bytes(kept))


@fault
def an_adapter_changes_on_the_disk(world: World) -> None:
    world.write_adapter(world.rng.choice(NAMES), world.rng.randrange(100))


@fault
def an_adapter_is_unloaded_while_it_is_used(world: World) -> None:
    name = world.rng.choice(NAMES)
    world.ask(adapter=name)
    world.ask(adapter=name)
    if world.pool.registry.get(name):
        world.pool.unload(name)


@fault
def the_disk_gives_an_error(world: World) -> None:
    reader = world.pool._reader

    class Broken:
        layout = reader.layout

        def read(self, path: Any) -> Any:
            raise OSError(errno.EIO, "input/output error")

        read_again = read

    world.pool._reader = Broken()  # type: ignore[assignment]
    world.ask(adapter=world.rng.choice(NAMES))
    world.later.append(lambda: setattr(world.pool, "_reader", reader))


# Processes.


@fault
def the_engine_is_killed(world: World) -> None:
    world.die()


@fault
def a_frame_is_garbled(world: World) -> None:
    world.link.to_core.append(world.rng.randbytes(20))


@fault
def a_frame_is_cut(world: World) -> None:
    world.link.to_core.append(encode([Abort((1, 2, 3))])[:-1])


@fault
def a_shutdown_in_the_middle(world: World) -> None:
    """As the loop does it: what runs fails, the client is told, the process ends."""
    world.core.handle([Shutdown()])
    out = world.core.close()
    world.check_messages(out)
    world.link.on_frame(out)
    world.die()


def next_of(world: World, number: int) -> None:
    world.link.to_core.append(encode([Abort((number, number))]))


def make_matchers_faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two grammars whose matcher breaks in the middle."""
    accept, fill = Matcher.accept, Matcher.fill_mask
    seen: dict[Matcher, bytes] = {}

    def broken_accept(self: Matcher, token: int) -> bool:
        text = seen[self] = (seen.get(self, b"") + bytes([token % 256]))[-6:]
        return accept(self, token) and text != b"broken"

    def broken_fill(self: Matcher, row: Any, remaining: int | None = None) -> None:
        fill(self, row, remaining)
        if seen.get(self, b"")[-5:] == b"empty":
            row[:] = 0

    monkeypatch.setattr(Matcher, "accept", broken_accept)
    monkeypatch.setattr(Matcher, "fill_mask", broken_fill)


@pytest.mark.parametrize(("seed", "overlaps"), [(0, False), (1, False), (3, True)])
async def test_every_request_ends_once_whatever_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, overlaps: bool
) -> None:
    """On a device that is waited for, and on one that computes while the next step is planned."""
    assert len(KINDS) >= 25
    world = World(tmp_path, seed, monkeypatch, overlaps=overlaps)
    make_matchers_faulty(monkeypatch)
    kinds = list(KINDS.values())
    try:
        for number in range(INJECTIONS // 3):
            for _ in range(world.rng.randint(0, 2)):
                world.ask_anything()
            for _ in range(world.rng.randint(0, 4)):
                await world.step()
            kinds[number % len(kinds)](world)
            for _ in range(world.rng.randint(1, 4)):
                await world.step()
            if number % 4 == 3:
                await world.settle()
        await world.settle()
        assert world.kills and world.has_preempted
        # After all of it the engine answers as if nothing had been.
        reader = world.ask(max_tokens=5, ignore_eos=True)
        await world.settle()
        assert reader.error is None and len(reader.tokens[0]) == 5
    finally:
        world.close()
