"""Fallbacks, routes and providers of a models file: what they say, and the limits of each, named in errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rootgraft.api.cli.flag_parser import parse_models
from rootgraft.api.config import ServerConfig
from rootgraft.api.fallback_plan import (
    MAX_PROMPT_CHARS,
    MOST_FALLBACKS,
    MOST_ROUTES,
    FallbackPlan,
    ModelRoute,
    Provider,
)
from rootgraft.api.models_file import ServedModel, check_plans
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.types import Priority

FILE = """
models:
  - model: org/big
    served-model-name: big
    fallback: [small, cloud]
    routes:
      - {to: small, max-prompt-chars: 200}
      - {to: cloud, priorities: [batch]}
  - model: org/small
    served-model-name: small
    fallback: cloud
providers:
  - {name: cloud, base-url: "https://api.example.com/v1/", model: mini, api-key-env: CLOUD_KEY, timeout: 5}
"""
KEY = "sk-very-secret"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CLOUD_KEY", f"{KEY}\n")

    def parsed(text: str) -> list[ServedModel]:
        path = tmp_path / "fleet.yaml"
        path.write_text(text)
        models = parse_models("serve", "", (EngineConfig, ServerConfig), "model", ["--config", str(path)])
        served = [ServedModel(entry, *options) for entry, options in models]
        check_plans(served, [each.server.served_model_name for each in served])
        return served

    return parsed


def test_a_models_file_says_who_answers_in_a_models_place(read: Any) -> None:
    cloud = Provider("cloud", "https://api.example.com/v1", "mini", KEY, 5.0)
    rules = (ModelRoute("small", 200), ModelRoute("cloud", None, frozenset((Priority.BATCH,))))
    big, small = (each.entry.plan for each in read(FILE))
    assert big == FallbackPlan(("small", "cloud"), rules, {"cloud": cloud})
    assert small == FallbackPlan(("cloud",), (), {"cloud": cloud})
    assert KEY not in repr((big, small)) and big and not FallbackPlan()


ENTRY = "models: [{model: a, served-model-name: a, %s}, {model: b, served-model-name: b}]\n"
PROVIDERS = "models: [{model: a, served-model-name: a}]\nproviders: %s\n"
GOOD = 'name: c, base-url: "http://c:1/v1", model: m'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTRY % "fallback: a", "a is the model itself"),
        (ENTRY % "fallback: c", "there is no model or provider c; there are: b"),
        (ENTRY % "fallback: 5", "models[0].fallback must be a name or a list"),
        (ENTRY % "fallback: ['']", "models[0].fallback must be a name or a list"),
        (ENTRY % f"fallback: [{', '.join(['b'] * (MOST_FALLBACKS + 1))}]", "a list of at most 8"),
        (ENTRY % "routes: {to: b}", "models[0].routes must be a list"),
        (ENTRY % f"routes: [{', '.join(['{to: b, priorities: [batch]}'] * (MOST_ROUTES + 1))}]", "at most 16 rules"),
        (ENTRY % "routes: [b]", "models[0].routes[0] must be a mapping"),
        (ENTRY % "routes: [{to: b}]", "must select requests"),
        (ENTRY % "routes: [{max-prompt-chars: 1}]", "models[0].routes[0].to must be the name"),
        (ENTRY % "routes: [{to: b, max-prompt-chars: 0}]", "must be a whole number from 1 to 16777216, not 0"),
        (ENTRY % f"routes: [{{to: b, max-prompt-chars: {MAX_PROMPT_CHARS + 1}}}]", "not 16777217"),
        (ENTRY % "routes: [{to: b, max-prompt-chars: true}]", "not True"),
        (ENTRY % "routes: [{to: b, priorities: [bulk]}]", "must be a list of realtime, interactive, batch"),
        (ENTRY % "routes: [{to: b, prompt: 5}]", "models[0].routes[0] has no key 'prompt'"),
        (PROVIDERS % "{}", "providers must be a list"),
        (
            PROVIDERS % f"[{', '.join(['{' + GOOD + '}'] * (MOST_FALLBACKS + 1))}]",
            "must be a list of at most 8",
        ),
        (PROVIDERS % f"[{{{GOOD}}}, {{{GOOD}}}]", "another provider already has the name c"),
        (PROVIDERS % "[{name: c, model: m}]", "providers[0].base-url must be a string"),
        (PROVIDERS % f"[{{{GOOD}, key: x}}]", "providers[0] has no key 'key'"),
        (PROVIDERS % f"[{{{GOOD}, api-key-env: NOT_SET_ANYWHERE}}]", "NOT_SET_ANYWHERE must hold the provider's key"),
        (PROVIDERS % f"[{{{GOOD}, timeout: 0.9}}]", "must be from 1 to 3600 seconds, not 0.9"),
        (PROVIDERS % f"[{{{GOOD}, timeout: 3601}}]", "must be from 1 to 3600 seconds, not 3601"),
        (PROVIDERS.replace("name: a}", "name: c}") % f"[{{{GOOD}}}]", "c is also the name of a model"),
        *(
            (PROVIDERS % f'[{{name: c, model: m, base-url: "{url}"}}]', "without a key in it")
            for url in ("ftp://c/v1", "c/v1", "http://", "http://u:p@c/v1", "http://c/v1?key=1", "http://c:x/v1")
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(read: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("timeout", [1, 3600])
@pytest.mark.parametrize("most", [1, MAX_PROMPT_CHARS])
def test_the_ends_of_the_limits_are_taken(read: Any, timeout: int, most: int) -> None:
    names = ", ".join(["b"] * MOST_FALLBACKS)
    rules = ", ".join([f"{{to: c, max-prompt-chars: {most}}}"] * MOST_ROUTES)
    text = ENTRY % f"fallback: [{names}], routes: [{rules}]"
    first = read(f"{text}providers: [{{{GOOD}, timeout: {timeout}}}]\n")[0].entry.plan
    assert len(first.fallbacks) == MOST_FALLBACKS and len(first.routes) == MOST_ROUTES
