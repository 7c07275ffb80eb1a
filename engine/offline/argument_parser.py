"""Argument parser as in vLLM: the words of an option may be joined by underscores, as in ``--max_model_len``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence


class FlexibleArgumentParser(ArgumentParser):
    """A parser for which ``--max_tokens`` and ``--max-tokens`` are the same option, however the script declares it.

    Values, and all arguments after ``--``, are not changed.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse arguments like ``ArgumentParser.parse_known_args``, by default those in ``sys.argv``."""
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        declared = {_hyphenated(option): option for option in self._option_string_actions}
        return super().parse_known_args([*(_declared(text, declared) for text in given[:end]), *given[end:]], namespace)


def _declared(text: str, declared: dict[str, str]) -> str:
    """Return an argument with its option spelled as declared. Any other text is returned unchanged."""
    name, equals, value = text.partition("=")
    known = declared.get(_hyphenated(name)) if name.startswith("--") else None
    return text if known is None else known + equals + value


def _hyphenated(option: str) -> str:
    return option.replace("_", "-")
