"""Ollama's client against a server on the real model: the answers of the chat route, held schemas, calls, vectors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from support.api.real_server import RealServer

pytestmark = pytest.mark.heavy
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Name three colours."}]
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
    "required": ["name", "people"],
    "additionalProperties": False,
}


@pytest.fixture
def client(real_server: RealServer) -> Iterator[ollama.Client]:
    made = ollama.Client(str(real_server.http.base_url), trust_env=False)
    yield made
    made._client.close()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7, "top_k": 40, "top_p": 0.9}])
def test_the_answers_of_the_chat_route(real_server: RealServer, client: ollama.Client, options: dict[str, Any]) -> None:
    fields = {"messages": ASKED, "max_tokens": 24, **options}
    choice = real_server.http.post("/v1/chat/completions", json=fields).json()["choices"][0]
    asked: Any = {"options": {**options, "num_predict": 24}}
    whole = client.chat("small", ASKED, **asked)
    assert whole.message.content == choice["message"]["content"] and whole.eval_count is not None
    assert "".join(part.message.content or "" for part in client.chat("small", ASKED, stream=True, **asked)) == (
        whole.message.content
    )
    assert client.generate("small", ASKED[0]["content"], **asked).response == whole.message.content


def test_schemas_and_calls_are_held(client: ollama.Client) -> None:
    for seed in range(2):
        text = client.chat("small", ASKED, format=CITY, options={"seed": seed, "num_predict": 60}).message.content
        found = json.loads(text or "")
        assert found.keys() == {"name", "people"} and len(found["name"]) <= 12 and type(found["people"]) is int
    short = client.generate("small", "A colour, in JSON.", format="json", options={"num_predict": 30})
    assert isinstance(json.loads(short.response or ""), dict)


def test_vectors_and_names(client: ollama.Client) -> None:
    one, other = client.embed("small", ["a cat", "a dog"]).embeddings
    assert len(one) == len(other) == 576 and abs(sum(value * value for value in one) - 1) < 1e-3
    assert client.list().models[0].model == "small" and client.show("small").template
