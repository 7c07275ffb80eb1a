# ruff: noqa: E501 (paragraphs of the page)
"""Writes the documentation's page on options from the options themselves and the tables of vLLM's and SGLang's.

python tests/support/options_page.py > docs/reference/options.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from rootgraft.api.config import ServerConfig
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.peer_options import ENVIRONMENT, PeerOption, read_options

_INTRODUCTION = """# Options

`rootgraft serve` takes its own options and, under their names, those of `vllm serve` and `sglang.launch_server`; the words after `vllm serve` or `python -m sglang.launch_server` can stay as they are. `run-batch` and `bench step` take those of the engine. This page is written from the tables that the command line uses (`tests/support/options_page.py`); a test compares them.

Each option of vLLM and SGLang is one of three things:

- **done**: it sets the option of ours that is named;
- **accepted**: it asks for what is so anyway, or it could change neither an answer nor what a client may ask. Where any value is accepted, the start says in a line why it has no effect;
- **refused**: an error of one line that says what to do instead. Nothing that would change answers is passed over.

**Spellings.** `--max-model-len 4096`, `--max-model-len=4096` and `--max_model_len 4096` are the same. Numbers may be short: `4k` is 4000, `4K` 4096, `25.6k` 25600. A switch has its `--no-` form and takes `=true` and `=false`. Options that hold JSON take their keys one by one: `--speculative-config.method ngram`; `+` appends to a list. Names are never cut short. The model is the first word, `--model` or `--model-path`; behind an option of several words (`--served-model-name a b`) it would be one of them, so there it is refused.

**Where they come from.** The command line counts before `--config FILE`, that before environment variables, and those before the defaults. The file is YAML, and its keys are long names:

```yaml
model: HuggingFaceTB/SmolLM2-135M-Instruct
port: 8001
max-model-len: 4k
enable-lora: true
lora-modules: [sql=adapters/sql, tickets=adapters/tickets]
```

**In Python** `LLM(...)` takes the keywords of vLLM's `LLM`: the names below with underscores, as far as they are no server's. What is done, accepted and refused is the same; why something has no effect goes to the logger `rootgraft.engine.offline.llm` at level info.
"""


def page() -> str:
    """The whole page, in Markdown."""
    vllm, sglang = read_options("vllm"), read_options("sglang")
    return "\n".join(
        [
            _INTRODUCTION,
            "## Ours\n",
            *_ours(),
            "## vLLM's\n\nOf vLLM 0.33.0, under the headings of its help.\n",
            *_peers(option for option in vllm.values() if option.section != ENVIRONMENT),
            "## SGLang's\n\nOf SGLang 0.5.23, those in common use that have another name than vLLM's.\n",
            *_peers(sglang.values()),
            f"## {ENVIRONMENT}\n",
            *_variables(option for option in vllm.values() if option.section == ENVIRONMENT),
        ]
    )


def _ours() -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for spec in (spec for cls in (EngineConfig, ServerConfig) for spec in fields(cls)):
        name = spec.name.replace("_", "-")
        switch = f"`--{name}`, `--no-{name}`" if isinstance(spec.default, bool) else f"`--{name}`"
        text = " ".join(filter(None, (_choices(spec.metadata["choices"]), _safe(spec.metadata["help"]))))
        groups.setdefault(spec.metadata["group"], []).append(f"| {switch} | {_default(spec.default)} | {text} |")
    yield "`--config FILE` names a file of options, or of [several base models](../guide/models-and-versions.md#several-base-models).\n"
    for title, rows in groups.items():
        yield "\n".join([f"### {title.capitalize()}\n", "| option | default | |", "|---|---|---|", *rows, ""])


def _default(value: Any) -> str:
    if value in (None, "", ()):
        return ""
    if isinstance(value, tuple):
        return " ".join(f"`{each}`" for each in value)
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"`{value}`"


def _choices(choices: Iterable[Any]) -> str:
    names = ", ".join(f"`{choice}`" for choice in choices)
    return names and f"{names}."


def _peers(options: Iterable[PeerOption]) -> Iterator[str]:
    sections: dict[str, list[str]] = {}
    for option in options:
        names = ", ".join(f"`{name}`" for name in (f"--{option.name}", *option.short))
        sections.setdefault(option.section, []).append(f"| {names} | {option.status} | {_about(option)} |")
    for title, rows in sections.items():
        yield "\n".join([f"### {title}\n", "| option | | |", "|---|---|---|", *rows, ""])


def _about(option: PeerOption) -> str:
    """What a row says beside its status."""
    if option.ours:
        also = f" and `--{option.also}`" if option.also else ""
        names = [f"`{value}` is `{ours}`" for value, ours in option.values.items() if ours != "None"]
        parts = ["" if option.ours == option.name else f"`--{option.ours}`{also}", ", ".join(names)]
        return ". ".join([*filter(None, parts), *([option.refuse] if option.refuse else [])])
    same = ", ".join(f"`{value.replace('..', ' to ')}`" if value else "an empty text" for value in option.same)
    if option.inert:
        return _sentence(option.inert)
    if option.takes == "flag" and same:
        return f"`--no-{option.name}`: {option.refuse}"
    return f"{same}; else: {option.refuse}" if same else _sentence(option.refuse)


def _sentence(text: str) -> str:
    return text if text.startswith("rootgraft ") else text[0].upper() + text[1:]


def _variables(options: Iterable[PeerOption]) -> Iterator[str]:
    rows = [f"| `{option.name}` | {option.status} | {_about(option)} |" for option in options]
    yield "\n".join(["| variable | | |", "|---|---|---|", *rows, ""])


def _safe(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
