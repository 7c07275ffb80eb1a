"""A command line parser in vLLM's form: an option's words may be joined by underscores, as in ``--max_model_len``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence


class FlexibleArgumentParser(ArgumentParser):
    """A parser for which ``--max_tokens`` and ``--max-tokens`` are one option, whichever of them a script declares.

    Values and what follows ``--`` are left as they are.
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
    """Return an argument with its option as it was declared, and any other text as it is."""
    name, equals, value = text.partition("=")
    known = declared.get(_hyphenated(name)) if name.startswith("--") else None
    return text if known is None else known + equals + value


def _hyphenated(option: str) -> str:
    return option.replace("_", "-")
