"""Checks of replies and of the fields that clients declare, and metrics as a scraper reads them."""

from __future__ import annotations

from typing import Any

import httpx
import pydantic
from prometheus_client.parser import text_string_to_metric_families

from rootgraft.api.protocol.base import StrictModel
from support.api.api_live import Live
from support.api.bad.bad_inputs import CHAT, COMPLETIONS, HI


def check_error(reply: httpx.Response, status: int, param: str | None, code: str | None) -> str:
    """The whole shape of an error; its message."""
    assert reply.status_code == status, reply.text
    assert reply.headers["x-request-id"] and reply.headers["content-type"] == "application/json"
    body = reply.json()
    keys = {"message", "type", "param", "code"}
    assert list(body) == ["error"]
    # A form that is refused comes with the place as data.
    assert set(body["error"]) in (keys, keys | {"keyword", "pointer", "reason"})
    error = body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert error["code"] == code, error
    message = str(error["message"])
    assert message.endswith(".") and len(message) < 400 and "Traceback" not in message
    if param is not None:
        assert param.partition("[")[0].partition(".")[0] in message or code == "context_length_exceeded", message
    return message


def complete(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": HI, **fields}
    return {"prompt": "ab", **fields} if path == COMPLETIONS else fields


def scrape(live: Live, **headers: str) -> dict[str, Any]:
    with live.http(headers=headers) as http:
        reply = http.get("/metrics")
    assert reply.status_code == 200
    return {family.name: family for family in text_string_to_metric_families(reply.text)}


def value(families: dict[str, Any], family: str, sample: str = "", **labels: str) -> float:
    """One sample's value. The family is named without its prefix, the sample by what follows the family's name."""
    found = [
        entry.value
        for entry in families["rootgraft:" + family].samples
        if entry.name == "rootgraft:" + family + sample and entry.labels.items() >= labels.items()
    ]
    assert len(found) == 1, (family, sample, labels, found)
    return float(found[0])


def declared(kind: Any) -> set[str]:
    """The fields of a client's ``TypedDict``, those that it inherits included."""
    return set(kind.__required_keys__ | kind.__optional_keys__)


def known(model: type[pydantic.BaseModel]) -> set[str]:
    """The fields that a model of ours takes, ignores or refuses by name."""
    names = {field.alias or name for name, field in model.model_fields.items()}
    return names | model.ignored | set(model.refused) if issubclass(model, StrictModel) else names


def undeclared(value: Any, place: str = "") -> list[str]:
    """Paths of fields that a model of the client took without knowing them."""
    if isinstance(value, list):
        return [path for index, each in enumerate(value) for path in undeclared(each, f"{place}[{index}]")]
    if not isinstance(value, pydantic.BaseModel):
        return []
    fields = [(f"{place}.{name}", getattr(value, name)) for name in type(value).model_fields]
    return [f"{place}.{name}" for name in value.model_extra or ()] + [
        path for name, each in fields for path in undeclared(each, name)
    ]
