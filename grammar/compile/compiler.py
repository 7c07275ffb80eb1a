"""From a grammar's text to a matcher, in this process and without a limit on time or memory.

A server compiles through `service`, which runs `lower` in a process that can be killed; `load` is what remains to be
done where the grammar is used.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import llguidance

from ..emit import plain_grammars
from ..emit.grammar_artifact import Backend, GrammarArtifact
from ..emit.lark_writer import to_lark
from ..emit.structural_tags import structural_tag_grammar
from ..errors import GrammarError
from ..match.backends import BackendState, LlguidanceBackend, XgrammarBackend, leads_to_end
from ..match.budget_close import BudgetClose
from ..match.closing_texts import ClosingTexts
from ..match.matcher import SLOW_SECONDS, Matcher
from ..schema.analysis import Analysis
from ..schema.document import Document
from ..schema.error_location import anchored, likeliest_part
from ..schema.static_limits import DEFAULT_LIMITS, Limits, check_limits
from ..spec import GrammarKind, GrammarSpec
from ..vocabulary import Vocabulary
from . import dry_run

# A vocabulary of 128k tokens needs more items for a mask than the library grants by default.
_PARSER_LIMITS = llguidance.LLParserLimits(verbose_errors=False, step_max_items=500_000)
_NOISE = re.compile(r"^at \d+\(\d+\): |\[\d\d:\d\d:\d\d\] |/\S+?:\d+: |Check failed: ")


class CompiledGrammar:
    """A grammar that matchers can be made from, for one vocabulary.

    Attributes:
        narrowings: where less is offered than the schema permits: (keyword, pointer, reason) each.
        num_bytes: what it takes in memory, about.
        error: why the library cannot follow the grammar; None after `lower` has let it through.
        is_spoilt: the library has failed along an answer, which may keep it from following any other.
    """

    def __init__(self, artifact: GrammarArtifact, vocabulary: Vocabulary) -> None:
        self.narrowings = artifact.narrowings
        self.num_bytes = artifact.num_bytes
        self._open_ended = artifact.open_ended
        self.is_spoilt = False
        self._artifact = artifact
        self._vocabulary = vocabulary
        self._state, self.error = _initial_state(artifact, vocabulary)
        self._pieces = ClosingTexts(vocabulary, artifact)

    @property
    def is_plain(self) -> bool:
        """Whether nothing in it is known to make masks slow."""
        return dry_run.is_plain(self._artifact)

    @property
    def num_shortest(self) -> int | None:
        """Tokens of the shortest answer (its end token not counted) that a budget is sure to complete, if known."""
        return self._pieces.num_shortest

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer."""
        budget_close = BudgetClose(self._pieces, free=self._open_ended and self._state.can_end())
        return Matcher(
            self._state,
            self._vocabulary,
            budget_close,
            self._remake,
            open_ended=self._open_ended,
            is_slow=self._artifact.is_slow,
        )

    def _remake(self) -> BackendState:
        self.is_spoilt = True
        return _initial_state(self._artifact, self._vocabulary)[0]

    def shortest(self) -> tuple[int, ...] | None:
        """The tokens of a short answer: that of the artifact if it is one, else what a search finds; or None."""
        known = self._artifact.whole
        if known and leads_to_end(self._state, known):
            return known
        unknown = ClosingTexts(self._vocabulary, replace(self._artifact, whole=()))
        found = BudgetClose(unknown).completion(self._state)
        return None if found is None else tuple(found)


def compile(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits = DEFAULT_LIMITS) -> CompiledGrammar:
    """Compile in this process.

    Raises:
        GrammarError: if the grammar is wrong, too large, or cannot be promised.
    """
    return load(lower(spec, vocabulary, limits), vocabulary)


def lower(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits = DEFAULT_LIMITS) -> GrammarArtifact:
    """Everything about a compile that may take long or fail, a dry run included.

    Raises:
        GrammarError: as `compile`.
    """
    check_limits(spec, limits)
    artifact = _translated(spec, vocabulary)
    compiled = CompiledGrammar(artifact, vocabulary)
    if compiled.error:
        raise likeliest_part(spec, _readable(compiled.error))
    try:
        slowest = dry_run.check(compiled, lambda: CompiledGrammar(artifact, vocabulary), vocabulary)
    except dry_run.DryRunError as error:
        raise likeliest_part(spec, str(error)) from None
    is_slow = slowest > SLOW_SECONDS
    if artifact.open_ended:
        return replace(artifact, is_slow=is_slow)
    shortest = compiled.shortest()
    return replace(artifact, is_slow=is_slow, whole=shortest or (), is_hopeless=shortest is None)


def load(artifact: GrammarArtifact, vocabulary: Vocabulary) -> CompiledGrammar:
    """Make an artifact usable."""
    return CompiledGrammar(artifact, vocabulary)


def _translated(spec: GrammarSpec, vocabulary: Vocabulary) -> GrammarArtifact:
    if spec.kind is GrammarKind.JSON_SCHEMA:
        artifact = _schema(spec.value(), vocabulary)
    elif spec.kind is GrammarKind.JSON_OBJECT:
        artifact = _schema({"type": "object"}, vocabulary)
    elif spec.kind is GrammarKind.EBNF:
        return _ebnf(spec, vocabulary)
    elif spec.kind is GrammarKind.STRUCTURAL_TAG:
        artifact = structural_tag_grammar(spec.value(), vocabulary)
    else:
        source, answers = plain_grammars.TRANSLATE[spec.kind](spec)
        artifact = GrammarArtifact(Backend.LLGUIDANCE, source, values=answers)
    return replace(artifact, num_bytes=20 * len(artifact.source) + (64 << 10))


def _schema(schema: Any, vocabulary: Vocabulary) -> GrammarArtifact:
    if schema is False:
        raise GrammarError("false", "", "the schema false admits no value")
    try:
        analysis = Analysis(Document({} if schema is True else schema))
        grammar = to_lark(analysis)
    except GrammarError as error:
        raise anchored(error, schema) from None
    return GrammarArtifact(
        Backend.LLGUIDANCE,
        grammar.text,
        tuple(vocabulary.tokenize(grammar.whole.encode())),
        grammar.properties,
        grammar.values,
        grammar.detour,
        is_json=True,
        narrowings=tuple(analysis.narrowings),
    )


def _ebnf(spec: GrammarSpec, vocabulary: Vocabulary) -> GrammarArtifact:
    info = vocabulary.xgrammar
    import xgrammar

    try:
        compiled = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_grammar(spec.text)
    except RuntimeError as error:
        raise GrammarError("ebnf", "", _readable(str(error))) from None
    source = compiled.serialize_json()
    return GrammarArtifact(Backend.XGRAMMAR, source, num_bytes=compiled.memory_size_bytes + len(source))


def _initial_state(artifact: GrammarArtifact, vocabulary: Vocabulary) -> tuple[BackendState, str | None]:
    if artifact.backend is Backend.XGRAMMAR:
        info = vocabulary.xgrammar
        import xgrammar

        automaton = xgrammar.CompiledGrammar.deserialize_json(artifact.source, info)
        return XgrammarBackend(xgrammar.GrammarMatcher(automaton)), None
    matcher = llguidance.LLMatcher(vocabulary.llguidance, artifact.source, log_level=0, limits=_PARSER_LIMITS)
    return LlguidanceBackend(matcher), matcher.get_error() or None


def _readable(message: str) -> str:
    """The first line of a library's message, without places in its source."""
    return _NOISE.sub("", message.strip().split("\n")[0])[:300]
