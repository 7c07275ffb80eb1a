"""A compiled grammar: what matchers are made from, for one vocabulary."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import llguidance

from ..emit.grammar_artifact import Backend, GrammarArtifact
from ..match.backends import BackendState, LlguidanceBackend, XgrammarBackend, leads_to_end
from ..match.budget_close import BudgetClose
from ..match.closing_texts import OUTSIDE, ClosingTexts, ranks
from ..match.completion_search import CompletionSearch
from ..match.entry_sets import EntryCounter
from ..match.least_ends import ChoiceEnds, LanguageTooLarge, LeastEnds, RegularEnds
from ..match.matcher import Matcher
from ..match.memory_state import MemoryState
from ..match.string_masks import StringRule
from ..match.string_state import StringState
from ..vocabulary import Vocabulary

# A vocabulary of 128k tokens needs more items for a mask than the library grants by default.
_PARSER_LIMITS = llguidance.LLParserLimits(verbose_errors=False, step_max_items=500_000)
# Limits for an answer that has exceeded one of the limits above. Its masks may take ten times the work, about 150 ms
# each. The limit on the lexer's states is unchanged because states take memory; the lexer is built again, and begins
# without states.
_LARGER_LIMITS = llguidance.LLParserLimits(
    verbose_errors=False,
    step_max_items=5_000_000,
    step_lexer_fuel=2_000_000,
    initial_lexer_fuel=100_000_000,  # fuel for all tokens that are replayed before the next mask
    max_items_in_row=20_000,
)


class CompiledGrammar:
    """A grammar loaded into its backend, with its closing texts.

    Attributes:
        artifact: artifact from which the grammar was loaded.
        error: why the backend cannot follow the grammar; None for what `compiler.lower` returns.
        has_failed: whether the backend has failed while it followed an answer; its lexer may then fail for all other
            answers too.
    """

    def __init__(self, artifact: GrammarArtifact, vocabulary: Vocabulary) -> None:
        self.artifact = artifact
        self.has_failed = False
        self._vocabulary = vocabulary
        self._rules = [StringRule(automaton, vocabulary) for automaton in artifact.strings]
        self._counters = [EntryCounter(language) for language in artifact.entries]
        state, self.error = _initial_state(artifact, vocabulary)
        self._state = self._with_rules(state)
        self._closing_texts = ClosingTexts(vocabulary, artifact, _least_ends(artifact, vocabulary))
        # Computed here, where no stream waits for it.
        ranks(vocabulary)
        if artifact.texts:
            self._closing_texts.prepare()

    @property
    def shared(self) -> list[tuple[object, int]]:
        """Parts that other grammars may share, and their sizes in bytes, which ``artifact.num_bytes`` is without."""
        of_entries = [part for counter in self._counters for part in counter.shared]
        return [*of_entries, *(part for rule in self._rules for part in rule.shared)]

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of an answer."""
        open_ended = self.artifact.open_ended
        budget_close = BudgetClose(self._closing_texts, free=open_ended and self._state.can_end())
        return Matcher(
            self._state,
            self._vocabulary,
            budget_close,
            self._rebuild,
            open_ended=open_ended,
            is_slow=self.artifact.is_slow,
        )

    def _rebuild(self) -> BackendState:
        self.has_failed = True
        return self._with_rules(_initial_state(self.artifact, self._vocabulary, _LARGER_LIMITS)[0])

    def _with_rules(self, state: BackendState) -> BackendState:
        if self.artifact.has_memory:
            has_parts = bool(self.artifact.lead_ins)
            state = MemoryState(state, self._counters, self._vocabulary, has_parts=has_parts)
        if not self._rules:
            return state
        return StringState(state, self._rules, self._vocabulary, self.artifact.lead_ins)

    def shortest(self) -> tuple[int, ...] | None:
        """Return the tokens of a short answer: the artifact's if the backend accepts it, else one from a search."""
        if (least_ends := self._closing_texts.least_ends) is not None:
            return least_ends.shortest()
        search = CompletionSearch(ClosingTexts(self._vocabulary, replace(self.artifact, shortest=())))
        known = self._vocabulary.recut(self.artifact.shortest)
        if known and leads_to_end(self._state.copy(), known):
            # The first shorter answer that is found need not be the shortest of all.
            while (found := search.shortest(self._state, OUTSIDE, len(known) + 20, len(known) - 1)) is not None:
                if len(found) >= len(known):
                    break
                known = found
            return tuple(known)
        found = search.shortest(self._state, OUTSIDE)
        return None if found is None else tuple(found)


def _least_ends(artifact: GrammarArtifact, vocabulary: Vocabulary) -> LeastEnds | None:
    """Return the least ends of all states if the language is a list or regular, and small enough."""
    if artifact.options:
        return ChoiceEnds(artifact.options, vocabulary)
    if artifact.language is not None:
        with suppress(LanguageTooLarge):
            return RegularEnds(artifact.language, vocabulary)
    return None


def _initial_state(
    artifact: GrammarArtifact, vocabulary: Vocabulary, limits: llguidance.LLParserLimits = _PARSER_LIMITS
) -> tuple[BackendState, str | None]:
    if artifact.backend is Backend.XGRAMMAR:
        info = vocabulary.xgrammar
        import xgrammar

        automaton = xgrammar.CompiledGrammar.deserialize_json(artifact.source, info)
        return XgrammarBackend(xgrammar.GrammarMatcher(automaton), vocabulary.size), None
    matcher = llguidance.LLMatcher(vocabulary.llguidance, artifact.source, log_level=0, limits=limits)
    return LlguidanceBackend(matcher), matcher.get_error() or None
