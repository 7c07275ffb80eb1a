"""Output items of a response: which text and which item the logprobs of a delta go with."""

from __future__ import annotations

from typing import Any

import pytest

from rootgraft.api.protocol.tools import Function, Tool
from rootgraft.api.responses.output_items import OutputItems
from rootgraft.api.structured.tool_formats import FORMATS
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.api.structured.tool_parser import ToolParser
from rootgraft.engine.serving.output_processor import Finish, TextDelta, TokenLogprob
from rootgraft.engine.types import FinishReason, Usage

END = Finish(FinishReason.STOP, Usage(1, 0, 1))


def parser() -> ToolParser:
    tools = [Tool(type="function", function=Function(name="f"))]
    output_format = tool_output_format(tools, "auto", FORMATS["hermes"], None, parallel=True)
    assert output_format is not None and output_format.tools is not None
    return ToolParser(output_format.tools)


def items_of(texts: list[str], *, thinks: bool = False) -> list[dict[str, Any]]:
    """The items of an answer, each text of which is one token."""
    items = OutputItems(parser(), 0, thinks=thinks)
    for number, text in enumerate(texts):
        scored = TokenLogprob(number, text, text.encode(), -1.0, 1, ())
        items.take(TextDelta(0, text, (number,), (scored,), finish=END if number + 1 == len(texts) else None))
    items.finish("completed")
    return items.items


def scored_text(item: dict[str, Any]) -> str:
    return "".join(each["token"] for each in item["content"][0]["logprobs"])


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("texts", [["a", " <", "b>"], ["<", "b"], ["a", "<tool_"], ["a ", " ", "<tool", "-box>", " c"]])
def test_logprobs_of_text_that_might_have_begun_a_call(texts: list[str], thinks: bool) -> None:
    [item] = items_of(texts, thinks=thinks)
    assert item["content"][0]["text"] == scored_text(item) == "".join(texts)


def test_no_logprobs_of_a_call_are_those_of_text() -> None:
    call = ["<tool_call>", '\n{"name": "f", ', '"arguments": ', "{}", "}\n", "</tool_call>"]
    message, called, after = items_of(["a", "b ", *call, "\n", "c", "d"])
    assert (message["type"], called["type"], after["type"]) == ("message", "function_call", "message")
    assert scored_text(message) == "ab "
    assert scored_text(after).endswith("cd") and "tool_call" not in scored_text(after)
