"""Grammar compiler: converts a spec to an artifact, in this process and without a limit on time or memory.

A server compiles through `compile_service`, which runs `lower` in a process that can be killed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

from ..emit import plain_grammars
from ..emit.ebnf_rules import check_ebnf
from ..emit.grammar_artifact import Backend, GrammarArtifact
from ..emit.lark_ends import lark_ends
from ..emit.lark_writer import to_lark
from ..emit.structural_tags import structural_tag_grammar
from ..errors import GrammarError
from ..match.matcher import SLOW_SECONDS
from ..match.memory_state import can_spell_entries
from ..match.string_state import can_spell_markers
from ..schema.analysis import Analysis
from ..schema.document import Document
from ..schema.error_location import complexity_error, relocated
from ..schema.fewest_tokens import text_of_fewest_tokens
from ..schema.static_limits import DEFAULT_LIMITS, Limits, check_limits
from ..spec import GrammarKind, GrammarSpec
from ..vocabulary import Vocabulary
from . import dry_run
from .compiled_grammar import CompiledGrammar

# Native memory that llguidance takes to load a grammar: for any grammar, and for each character of its source. Measured
# with glibc's counters over 60 published schemas, with an error of 4 %. Sources with few terminals take less; the
# states that answers add are not included.
_LEAST_BYTES, _BYTES_PER_CHARACTER = 64 << 10, 60
_WHY = "error:"
_NOISE = re.compile(r"^at \d+\(\d+\): |\[\d\d:\d\d:\d\d\] |/\S+?:\d+: |Check failed: ")


def compile(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits = DEFAULT_LIMITS) -> CompiledGrammar:
    """Compile in this process.

    Raises:
        GrammarError: if the grammar is wrong, too large, or not supported.
    """
    return CompiledGrammar(lower(spec, vocabulary, limits), vocabulary)


def lower(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits = DEFAULT_LIMITS) -> GrammarArtifact:
    """Run the part of a compile that may take long or fail: checks, translation and a dry run.

    Raises:
        GrammarError: as `compile`.
    """
    check_limits(spec, limits)
    artifact = _translated(spec, vocabulary)
    compiled = CompiledGrammar(artifact, vocabulary)
    if compiled.error:
        raise complexity_error(spec, _readable(compiled.error))
    try:
        slowest = dry_run.check(compiled, vocabulary)
        if not artifact.open_ended:
            shortest = compiled.shortest()
            artifact = replace(artifact, shortest=shortest or (), search_failed=shortest is None)
        slowest = max(slowest, dry_run.check_search(CompiledGrammar(artifact, vocabulary), vocabulary))
    except dry_run.DryRunError as error:
        raise complexity_error(spec, str(error)) from None
    return replace(artifact, is_slow=slowest > SLOW_SECONDS)


def _translated(spec: GrammarSpec, vocabulary: Vocabulary) -> GrammarArtifact:
    if spec.kind is GrammarKind.JSON_SCHEMA:
        artifact = _schema(spec.value(), vocabulary)
    elif spec.kind is GrammarKind.JSON_OBJECT:
        artifact = _schema({"type": "object"}, vocabulary)
    elif spec.kind is GrammarKind.EBNF:
        return _ebnf(spec, vocabulary)
    elif spec.kind is GrammarKind.STRUCTURAL_TAG:
        markers, memory = can_spell_markers(vocabulary), can_spell_entries(vocabulary)
        artifact = structural_tag_grammar(spec.value(), vocabulary, with_string_rules=markers, with_memory=memory)
    else:
        plain = plain_grammars.TRANSLATE[spec.kind](spec)
        artifact = GrammarArtifact(
            Backend.LLGUIDANCE, plain.source, values=plain.answers, options=plain.options, language=plain.language
        )
    if spec.kind is GrammarKind.LARK:
        cheap = partial(text_of_fewest_tokens, vocabulary=vocabulary)
        found = lark_ends(spec.text, lambda text: vocabulary.fewest_counts(text.encode())[0], cheap=cheap)
        artifact = replace(artifact, texts=found.ends, ends=found.ends, detour=max(found.ends, key=len, default=""))
    automata = sum(each.num_bytes for each in artifact.strings) + sum(each.num_bytes for each in artifact.entries)
    automata += 16 * sum(map(len, artifact.options)) + (artifact.language.num_bytes if artifact.language else 0)
    num_bytes = _BYTES_PER_CHARACTER * len(artifact.source) + _LEAST_BYTES + automata
    return replace(artifact, num_bytes=num_bytes)


def _schema(schema: Any, vocabulary: Vocabulary) -> GrammarArtifact:
    if schema is False:
        raise GrammarError("false", "", "the schema false admits no value")
    try:
        analysis = Analysis(Document({} if schema is True else schema))
        first_entry = 1 if can_spell_entries(vocabulary) else None
        grammar = to_lark(
            analysis, vocabulary, with_string_rules=can_spell_markers(vocabulary), first_entry=first_entry
        )
    except GrammarError as error:
        raise relocated(error, schema) from None
    return GrammarArtifact(
        Backend.LLGUIDANCE,
        grammar.text,
        tuple(vocabulary.tokenize(grammar.shortest.encode())),
        grammar.properties,
        grammar.values,
        grammar.detour,
        is_json=True,
        narrowings=tuple(analysis.narrowings),
        strings=grammar.strings,
        entries=grammar.entries,
        has_memory=grammar.has_memory,
        scalars=grammar.scalars,
        containers=grammar.containers,
        optional=grammar.optional,
    )


def _ebnf(spec: GrammarSpec, vocabulary: Vocabulary) -> GrammarArtifact:
    try:
        import xgrammar
    except ModuleNotFoundError:
        cure = "Try: pip install 'rootgraft[ebnf]', or a grammar in Lark's syntax"
        raise GrammarError("ebnf", "", f"the server lacks the package xgrammar. {cure}") from None
    check_ebnf(spec.text)
    info = vocabulary.xgrammar
    try:
        compiled = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_grammar(spec.text)
    except RuntimeError as error:
        raise GrammarError("ebnf", "", _readable(str(error))) from None
    source = compiled.serialize_json()
    return GrammarArtifact(Backend.XGRAMMAR, source, num_bytes=compiled.memory_size_bytes + len(source))


def _readable(message: str) -> str:
    """Return the first line of a library's message, without positions in its source, and the line that tells why."""
    first, *rest = message.strip().split("\n")
    why = next((line for line in rest if line.startswith(_WHY)), "").removeprefix(_WHY)
    return _NOISE.sub("", first)[:300] + why[:100]
