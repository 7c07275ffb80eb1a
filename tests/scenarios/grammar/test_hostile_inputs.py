"""Hostile inputs: each is refused with a reason, or can be followed for a while, all under the server's limits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.machine.thoroughness import taking_turns
from support.machine.waits import HANG_SECONDS

from benchmarks.grammar.hostile_inputs import inputs
from rootgraft.api.protocol.completions import CompletionRequest
from rootgraft.api.structured.output_format import requested_format
from rootgraft.engine.errors import GrammarRefused
from rootgraft.grammar.compile.compile_service import CompileService
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.match.matcher import GrammarFailure
from rootgraft.grammar.schema.static_limits import DEFAULT_LIMITS

INPUTS = inputs()
WALK = 25


@pytest.fixture(scope="module")
def service(vocabulary) -> Iterator[CompileService]:
    service = CompileService(vocabulary, workers=2)
    yield service
    service.close()


def outcome(service: CompileService, grammars, fields) -> str:
    """What becomes of an input: refused (statically or by the compiler), or followed."""
    try:
        output_format = requested_format(CompletionRequest.model_validate({"model": "m", "prompt": "x", **fields}))
        assert output_format is not None
        compiled = service.compile(output_format.spec).result(HANG_SECONDS)
    except GrammarRefused as error:
        assert error.param and error.keyword and error.reason
        return "refused"
    except GrammarError as error:
        assert error.keyword and error.reason and len(error.reason) < 1_000
        assert "/root" not in error.reason and "panic" not in error.reason
        return "refused"
    matcher, rng = compiled.matcher(), random.Random(0)
    for step in range(WALK):
        try:
            allowed = sorted(grammars.allowed(matcher, 200 - step))
        except GrammarFailure:
            return "failed"
        assert matcher.accept(rng.choice(allowed))
        if matcher.is_done:
            break
    return "followed"


def test_there_are_many_and_all_differ():
    assert len({str(fields) for _, fields in INPUTS}) == len(INPUTS) >= 135
    assert DEFAULT_LIMITS.pattern_bytes < 4_096


@pytest.mark.sample
@pytest.mark.parametrize("part", range(3))
def test_a_sample_is_refused_or_followed(service, grammars, part):
    for name, fields in random.Random(1).sample(INPUTS, 24)[part::3]:
        if "ebnf" not in fields:  # whose library takes seconds to be imported
            assert outcome(service, grammars, fields) != "failed", name


@pytest.mark.heavy
@pytest.mark.parametrize("part", taking_turns(range(20), 4))
def test_every_one_is_refused_or_followed(service, grammars, part):
    failed = [name for name, fields in INPUTS[part::20] if outcome(service, grammars, fields) == "failed"]
    assert not failed
