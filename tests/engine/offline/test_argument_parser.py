"""The parser with which vLLM's examples begin."""

from __future__ import annotations

import sys

import pytest

from rootgraft import EngineArgs
from rootgraft.utils import FlexibleArgumentParser


def test_words_of_an_option_are_joined_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    group = parser.add_argument_group("of the script")
    group.add_argument("--max_tokens", type=int)
    group.add_argument("--top-p", type=float)
    parser.add_argument("files", nargs="*")
    line = ["--max_model-len=64", "--max-tokens", "3", "--top_p", "0.5", "a_b", "--", "--top_q"]
    monkeypatch.setattr(sys, "argv", ["script", *line])
    args = vars(parser.parse_args())
    assert args == {"max_model_len": 64, "max_tokens": 3, "top_p": 0.5, "files": ["a_b", "--top_q"]}
    with pytest.raises(SystemExit):
        parser.parse_args(["--top_q", "1"])
