"""Fallback plan of a model: which models or providers answer instead of it, by rules or when it fails.

models:
  - model: org/big
    served-model-name: big
    fallback: [small, cloud]              # in this order, on overload or failure before the first byte
    routes:
      - {to: small, max-prompt-chars: 200}
      - {to: small, priorities: [batch]}
  - model: org/small
    served-model-name: small
providers:
  - name: cloud
    base-url: https://api.example.com/v1
    model: example-mini                   # as the provider calls it
    api-key-env: EXAMPLE_API_KEY
    timeout: 60
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..engine.errors import ConfigError
from ..engine.types import Priority

MOST_FALLBACKS = 8
MOST_ROUTES = 16
MAX_PROMPT_CHARS = 1 << 24
_MAX_NAME = 256
_LONGEST_TIMEOUT = 3600.0
_PROVIDER_KEYS = frozenset(("name", "base-url", "model", "api-key-env", "timeout"))
_ROUTE_KEYS = frozenset(("to", "max-prompt-chars", "priorities"))


@dataclass(frozen=True, slots=True)
class Provider:
    """An OpenAI-compatible server elsewhere.

    Attributes:
        name: name of the server in the models file, the response header and the usage ledger.
        base_url: the server's base URL without a slash at its end.
        model: name of the model in requests to this server.
        key: API key for the Authorization header; "" for none. The object's ``repr`` does not contain it.
        timeout: seconds without a byte after which the server counts as failed.
    """

    name: str
    base_url: str
    model: str
    key: str = field(default="", repr=False)
    timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A rule by which another model answers a request directly.

    Attributes:
        to: name of the model or provider.
        max_prompt_chars: largest number of characters of the prompt; None for any number.
        priorities: priority classes of the requests to which the rule applies; empty for all classes.
    """

    to: str
    max_prompt_chars: int | None = None
    priorities: frozenset[Priority] = frozenset()

    def fits(self, num_chars: int, priority: Priority) -> bool:
        """Return whether the rule applies to a request."""
        is_short = self.max_prompt_chars is None or num_chars <= self.max_prompt_chars
        return is_short and (not self.priorities or priority in self.priorities)


@dataclass(frozen=True, slots=True)
class FallbackPlan:
    """The fallbacks and routes of a model, and all providers by name."""

    fallbacks: tuple[str, ...] = ()
    routes: tuple[ModelRoute, ...] = ()
    providers: Mapping[str, Provider] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.fallbacks or self.routes)

    @property
    def targets(self) -> list[str]:
        """All names of models and providers to which the plan refers."""
        return [*self.fallbacks, *(route.to for route in self.routes)]


def read_providers(source: str, content: Any) -> dict[str, Provider]:
    """Parse the providers of a models file. Returns them by name. Raises ConfigError."""
    if not isinstance(content, list) or len(content) > MOST_FALLBACKS:
        raise ConfigError(f"{source}: providers must be a list of at most {MOST_FALLBACKS} providers.")
    found: dict[str, Provider] = {}
    for index, each in enumerate(content):
        provider = _provider(f"{source}: providers[{index}]", each)
        if provider.name in found:
            raise ConfigError(
                f"{source}: providers[{index}].name: another provider already has the name {provider.name}."
            )
        found[provider.name] = provider
    return found


def read_plan(place: str, options: dict[str, Any], providers: Mapping[str, Provider]) -> FallbackPlan:
    """Remove ``fallback`` and ``routes`` from the options of a model, and parse them. Raises ConfigError."""
    names = options.pop("fallback", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or len(names) > MOST_FALLBACKS or not all(map(_is_name, names)):
        raise ConfigError(
            f"{place}.fallback must be a name or a list of at most {MOST_FALLBACKS} names, not {names!r}."
        )
    routes = options.pop("routes", [])
    if not isinstance(routes, list) or len(routes) > MOST_ROUTES:
        raise ConfigError(f"{place}.routes must be a list of at most {MOST_ROUTES} rules, not {routes!r}.")
    rules = tuple(_route(f"{place}.routes[{index}]", each) for index, each in enumerate(routes))
    return FallbackPlan(tuple(names), rules, providers)


def check_plan(place: str, plan: FallbackPlan, own: Sequence[str], served: Sequence[str]) -> None:
    """Check that the names in a plan exist.

    Args:
        place: place of the plan in the models file, for errors.
        own: names of the model to which the plan belongs.
        served: names of all base models of the server.

    Raises:
        ConfigError: a name is the model's own, does not exist, or belongs to both a model and a provider.
    """
    for name in plan.providers:
        if name in served:
            raise ConfigError(f"providers: {name} is also the name of a model: rename one of them.")
    for name in plan.targets:
        if name in own:
            raise ConfigError(f"{place}: {name} is the model itself: a fallback must be another model.")
        if name not in served and name not in plan.providers:
            known = ", ".join([*(each for each in served if each not in own), *plan.providers]) or "none"
            raise ConfigError(f"{place}: there is no model or provider {name}; there are: {known}.")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= _MAX_NAME


def _fields(place: str, content: Any, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{place} must be a mapping with {', '.join(sorted(known))}, not {content!r}.")
    options = {str(key).replace("_", "-"): value for key, value in content.items()}
    if unknown := sorted(options.keys() - known):
        raise ConfigError(f"{place} has no key {unknown[0]!r}; its keys are {', '.join(sorted(known))}.")
    return options


def _provider(place: str, content: Any) -> Provider:
    options = _fields(place, content, _PROVIDER_KEYS)
    for name in ("name", "base-url", "model"):
        if not _is_name(options.get(name)):
            raise ConfigError(f"{place}.{name} must be a string of 1 to {_MAX_NAME} characters.")
    timeout = options.get("timeout", 60.0)
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not 1 <= timeout <= _LONGEST_TIMEOUT:
        raise ConfigError(f"{place}.timeout must be from 1 to {_LONGEST_TIMEOUT:.0f} seconds, not {timeout!r}.")
    url = _base_url(place, options["base-url"])
    return Provider(options["name"], url, options["model"], _key(place, options.get("api-key-env")), float(timeout))


def _base_url(place: str, text: str) -> str:
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url or not text.isascii() or any(each in text for each in "@?# "):
        raise ConfigError(f"{place}.base-url must be a URL such as https://api.example.com/v1, without a key in it.")
    return text.rstrip("/")


def _key(place: str, variable: Any) -> str:
    if variable is None:
        return ""
    if not _is_name(variable):
        raise ConfigError(f"{place}.api-key-env must be the name of an environment variable.")
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{place}.api-key-env: the environment variable {variable} must hold the provider's key.")
    return key


def _route(place: str, content: Any) -> ModelRoute:
    options = _fields(place, content, _ROUTE_KEYS)
    if not _is_name(options.get("to")):
        raise ConfigError(f"{place}.to must be the name of a model or provider.")
    most = options.get("max-prompt-chars")
    if most is not None and not (type(most) is int and 1 <= most <= MAX_PROMPT_CHARS):
        raise ConfigError(
            f"{place}.max-prompt-chars must be a whole number from 1 to {MAX_PROMPT_CHARS}, not {most!r}."
        )
    names = options.get("priorities", [])
    known = {priority.name.lower(): priority for priority in Priority}
    if not isinstance(names, list) or not all(isinstance(name, str) and name in known for name in names):
        raise ConfigError(f"{place}.priorities must be a list of {', '.join(known)}, not {names!r}.")
    if most is None and not names:
        raise ConfigError(f"{place} must select requests with max-prompt-chars, priorities or both.")
    return ModelRoute(options["to"], most, frozenset(known[name] for name in names))
