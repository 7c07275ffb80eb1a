"""Random operations on a cache against the model, everything checked after each of thousands of steps."""

import random
from array import array

import pytest
from support.engine.cache_model import BASE, NAMESPACES, Simulation
from support.machine.thoroughness import repeats

from rootgraft.radix.namespace import Namespace, Path
from rootgraft.radix.soft_pins import PinKind

PAGE_SIZES = (1, 2, 4, 16)


class Driver:
    """Draws operations: prompts go on from earlier ones, so that paths meet, part and share pages."""

    def __init__(self, seed: int, page_size: int) -> None:
        self.random = random.Random(seed)
        self.page_size = page_size
        self.simulation = Simulation(self.random.choice((6, 14, 32)), page_size)
        self.history: list[tuple[Path, array[int]]] = [(Path(BASE), array("i"))]

    def step(self) -> None:
        """One operation and all checks."""
        running = self.simulation.running
        draw = self.random.random()
        if not running or (draw < 0.2 and len(running) < 4):
            self._start()
        elif draw < 0.55:
            self._extend(self.random.choice(running))
        elif draw < 0.7:
            self.simulation.commit(self.random.choice(running))
        elif draw < 0.75:
            self._draft(self.random.choice(running))
        elif draw < 0.92:
            self._finish(self.random.choice(running))
        elif draw < 0.975:
            self._hold()
        elif draw < 0.98:
            self.simulation.wait()
        else:
            self.simulation.drop(self.random.choice(NAMESPACES))
        self.simulation.check()

    def _start(self) -> None:
        path, tokens = self.random.choice(self.history)
        tokens = tokens[: self.random.randint(0, len(tokens))]
        tokens.extend(self.random.randrange(2) for _ in range(self.random.randint(0, 2 * self.page_size + 1)))
        if self.random.random() < 0.3:
            path = self._path(len(tokens))
        sequence = self.simulation.start(path, tokens, self.random.choice((len(tokens), max(len(tokens) - 1, 0))))
        if self.random.random() < 0.1:
            self.simulation.give_up(sequence)
        else:
            self.simulation.admit(sequence)

    def _path(self, num_tokens: int) -> Path:
        namespace = self.random.choice(NAMESPACES)
        before = self.random.choice((BASE, BASE, Namespace("r1", None, "a"), Namespace("r1", tenant="t")))
        if namespace == before or self.random.random() < 0.4:
            return Path(namespace)
        return Path(namespace, self.random.randint(1, num_tokens + 2), before)

    def _extend(self, sequence) -> None:
        if sequence.num_computed == len(sequence.tokens):
            self.simulation.append(sequence, self.random.randrange(2))
        most = self.random.choice((1, self.page_size, 3 * self.page_size))
        if not self.simulation.extend(sequence, most):
            self._finish(self.random.choice(self.simulation.running))

    def _draft(self, sequence) -> None:
        """Only whoever has computed all tokens but the last drafts; a step then follows at once."""
        if sequence.lease.copy is None and sequence.num_computed == len(sequence.tokens) - 1:
            self.simulation.draft(sequence, self.random.randint(1, 2 * self.page_size))

    def _hold(self) -> None:
        """At most a few paths at a time."""
        if len(self.simulation.held) > 3 or (self.simulation.held and self.random.random() < 0.4):
            self.simulation.unpin(self.random.choice(self.simulation.held))
        path, tokens = self.random.choice(self.history)
        self.simulation.keep(path, tokens[: self.random.randint(0, len(tokens))], self.random.choice(list(PinKind)))

    def _finish(self, sequence) -> None:
        self.history.append((sequence.path, sequence.tokens))
        del self.history[:-8]
        self.simulation.finish(sequence)


def drive(seed: int, page_size: int, steps: int) -> None:
    driver = Driver(seed, page_size)
    for _ in range(steps):
        driver.step()
    for sequence in list(driver.simulation.running):
        driver.simulation.finish(sequence)
    driver.simulation.check()
    assert driver.simulation.cache.num_private == 0
    assert driver.simulation.cache.available() == driver.simulation.cache.num_pages


@pytest.mark.sample
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_thousands_of_steps(page_size):
    for seed in range(5):
        drive(seed, page_size, 500)


@pytest.mark.heavy
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_many_thousands_of_steps(page_size):
    for seed in range(repeats(15)):
        drive(1000 + seed, page_size, 500)
