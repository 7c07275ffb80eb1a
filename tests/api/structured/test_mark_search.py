"""The search for many marks finds what a search for each of them finds, with work that does not grow with them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.api.protocol.tools import Function, Tool
from rootgraft.api.structured.mark_search import MarkSearch
from rootgraft.api.structured.tool_formats import FORMATS
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.api.structured.tool_parser import ToolParser

TEXTS = st.text("ab<", max_size=8)


@settings(max_examples=repeats(600))
@given(st.lists(TEXTS, max_size=5), st.text("ab<", max_size=20))
def test_it_finds_what_single_searches_find(marks: list[str], text: str) -> None:
    search, marks = MarkSearch(marks), [mark for mark in marks if mark]
    assert search.find(text) == min((at for mark in marks if (at := text.find(mark)) >= 0), default=-1)
    begun = [size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])]
    assert search.num_held(text) == max(begun, default=0)


def num_calls(run: Callable[[], object]) -> int:
    """Return how many functions ``run`` calls, those written in C included."""
    count = 0

    def note(_frame: object, event: str, _function: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if form.recipient_mark])
def test_a_token_of_an_answer_costs_the_same_with_many_tools(form: str) -> None:
    """With 256 tools, each token of each of 16 answers took 18 ms on the event loop."""

    def calls(num_tools: int) -> int:
        tools = [Tool(type="function", function=Function(name=f"f{at:03}_{'x' * 50}")) for at in range(num_tools)]
        output_format = tool_output_format(tools, "auto", FORMATS[form], None, parallel=True)
        assert output_format is not None and output_format.tools is not None
        parser = ToolParser(output_format.tools)
        parser.push(FORMATS[form].content_opening)
        parser.push("some")
        return num_calls(lambda: parser.push(" words"))

    assert calls(128) <= calls(4) + 20
