"""A command line parser in vLLM's form: the words of an option may be joined by underscores: ``--max_model_len``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence


class FlexibleArgumentParser(ArgumentParser):
    """A parser for which ``--max_tokens`` and ``--max-tokens`` are one option, whichever of the two a script declares.

    Values, and all arguments after ``--``, are left unchanged.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse as ``ArgumentParser`` does, from ``sys.argv`` by default."""
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        declared = {_hyphenated(option): option for option in self._option_string_actions}
        return super().parse_known_args([*(_declared(text, declared) for text in given[:end]), *given[end:]], namespace)


def _declared(text: str, declared: dict[str, str]) -> str:
    """Return an argument whose option is spelled as declared; return any other text unchanged."""
    name, equals, value = text.partition("=")
    known = declared.get(_hyphenated(name)) if name.startswith("--") else None
    return text if known is None else known + equals + value


def _hyphenated(option: str) -> str:
    return option.replace("_", "-")
