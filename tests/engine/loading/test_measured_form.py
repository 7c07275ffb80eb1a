"""Forms of weights that a start measures: other programs of the machine lengthen times and decide nothing."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.loading.measured_form import MOST_ROUNDS, least_times


def _measure(true: float, delays: list[float]) -> Callable[[], float]:
    """A time that is ``true``, but for the delays of the first rounds."""
    rest = iter(delays)
    return lambda: true * (1 + next(rest, 0.0))


@given(
    true=st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=3),
    delays=st.lists(st.floats(0.2, 30.0), max_size=MOST_ROUNDS - 2, unique_by=lambda each: round(each, 1)),
)
def test_a_machine_that_is_busy_for_a_while_is_waited_for(true: list[float], delays: list[float]) -> None:
    apart = [each for rank, each in enumerate(sorted(delays)) if rank % 2 == 0]  # no two of them confirm each other
    apart = [each for at, each in enumerate(apart) if at == 0 or 1 + each > 1.1 * (1 + apart[at - 1])]
    assert least_times([_measure(each, apart) for each in true], 2) == tuple(true)


def test_a_quiet_machine_is_measured_twice_and_a_busy_one_has_an_end() -> None:
    calls = 0

    def quiet() -> float:
        nonlocal calls
        calls += 1
        return 1.0

    assert least_times([quiet], 2) == (1.0,) and calls == 2
    never_alike = iter(2.0**each for each in range(100))
    assert least_times([lambda: next(never_alike)], 2) == (1.0,)
    assert next(never_alike) == 2.0**MOST_ROUNDS
