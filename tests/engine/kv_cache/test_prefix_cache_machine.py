"""The same operations as the random driver, chosen by Hypothesis, which shrinks what fails."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.engine.cache_model import BASE, NAMESPACES, Running, Simulation
from support.machine.thoroughness import repeats

from rootgraft.radix.namespace import Path
from rootgraft.radix.soft_pins import PinKind

TOKENS = st.lists(st.integers(0, 1), max_size=9)
PATHS = st.one_of(
    st.sampled_from([Path(namespace) for namespace in NAMESPACES[:5]]),
    st.builds(Path, st.sampled_from(NAMESPACES[1:3]), st.integers(1, 8), st.just(BASE)),
)
some_running = precondition(lambda self: self.simulation.running)


class CacheMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from((1, 2, 4)), num_pages=st.integers(2, 24))
    def build(self, page_size: int, num_pages: int) -> None:
        self.simulation = Simulation(num_pages, page_size)
        self.ended: list[tuple[Path, array]] = []

    def pick(self, index: int) -> Running:
        return self.simulation.running[index % len(self.simulation.running)]

    def end(self, sequence: Running) -> None:
        self.ended.append((sequence.path, sequence.tokens))
        self.simulation.finish(sequence)

    @rule(path=PATHS, tokens=TOKENS, spare=st.integers(0, 1))
    def give_up(self, path: Path, tokens: list[int], spare: int) -> None:
        self.simulation.give_up(self.simulation.start(path, array("i", tokens), max(len(tokens) - spare, 0)))

    @rule(path=PATHS, tokens=TOKENS, commit=st.booleans(), finish=st.booleans())
    def run(self, path: Path, tokens: list[int], commit: bool, finish: bool) -> None:
        sequence = self.simulation.start(path, array("i", tokens), len(tokens))
        self.simulation.admit(sequence)
        self.simulation.extend(sequence, len(tokens))
        if commit:
            self.simulation.commit(sequence)
        if finish:
            self.end(sequence)

    @precondition(lambda self: self.ended)
    @rule(index=st.integers(0, 99), keep=st.integers(0, 20), tokens=TOKENS)
    def go_on(self, index: int, keep: int, tokens: list[int]) -> None:
        path, earlier = self.ended[index % len(self.ended)]
        prompt = earlier[:keep] + array("i", tokens)
        self.simulation.admit(self.simulation.start(path, prompt, len(prompt)))

    @some_running
    @rule(index=st.integers(0, 99), num_new=st.integers(1, 9), token=st.integers(0, 1))
    def extend(self, index: int, num_new: int, token: int) -> None:
        sequence = self.pick(index)
        self.simulation.append(sequence, token)
        self.simulation.extend(sequence, num_new)

    @some_running
    @rule(index=st.integers(0, 99))
    def commit(self, index: int) -> None:
        self.simulation.commit(self.pick(index))

    @some_running
    @rule(index=st.integers(0, 99))
    def finish(self, index: int) -> None:
        self.end(self.pick(index))

    @rule(namespace=st.sampled_from(NAMESPACES[:5]))
    def drop(self, namespace) -> None:
        self.simulation.drop(namespace)

    @precondition(lambda self: self.ended)
    @rule(index=st.integers(0, 99), keep=st.integers(0, 20), kind=st.sampled_from(PinKind))
    def keep(self, index: int, keep: int, kind: PinKind) -> None:
        path, earlier = self.ended[index % len(self.ended)]
        self.simulation.keep(path, earlier[:keep], kind)

    @precondition(lambda self: self.simulation.held)
    @rule(index=st.integers(0, 99))
    def unpin(self, index: int) -> None:
        self.simulation.unpin(self.simulation.held[index % len(self.simulation.held)])

    @rule()
    def wait(self) -> None:
        self.simulation.wait()

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check()


@pytest.mark.sample
def test_machine():
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=repeats(100), stateful_step_count=40))


@pytest.mark.heavy
def test_machine_longer():
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=repeats(150), stateful_step_count=80))
