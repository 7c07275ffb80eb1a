"""Typed decisions about mails: the base model chooses a team, and an adapter answers the same question about the text.

rootgraft serve --enable-lora --lora-modules pirate=examples/adapters/pirate
python triage.py [URL] [ADAPTER]

OpenAI's client from 3.57 on has the same call as ``client.decisions.create``.
"""

import sys
from typing import Any

import httpx

MAILS = [
    "The parcel arrived broken, and nobody answers the phone. I want my money back today.",
    "Could you tell me whether the blue kettle will be in stock again before Easter?",
]
TEAMS = ["refunds", "repairs", "sales"]


def questions(adapter: str) -> list[dict[str, object]]:
    """Return the questions; a question may name the adapter that answers it, which is an extension."""
    levels = [{"label": "low"}, {"label": "high"}]
    team = {"type": "choice", "instructions": "Which team?", "choices": [{"value": each} for each in TEAMS]}
    return [
        {"type": "predicate", "name": "angry", "instructions": "The customer is angry."},
        {"type": "score", "name": "urgency", "instructions": "How urgent?", "levels": levels},
        {**team, "name": "team"},
        {**team, "name": f"team by {adapter}", "model": adapter},
    ]


def said(answer: dict[str, Any]) -> str:
    """Return what an answer decides, with the shares of its labels."""
    if answer["type"] == "predicate":
        return f"{answer['probability']:.0%}"
    shares = [f"{each.get('label', each['value'])} {each['probability']:.0%}" for each in answer["probabilities"]]
    return ", ".join(shares)


def main(url: str = "http://127.0.0.1:8000/v1", adapter: str = "pirate") -> None:
    """Print each answer with its probability, and how many prompt tokens came from the cache."""
    cached = prompt = 0
    with httpx.Client(base_url=url, timeout=600) as client:
        model = client.get("models").json()["data"][0]["id"]
        for mail in MAILS:
            body = {"model": model, "input": mail, "questions": questions(adapter)}
            decision = client.post("decisions", json=body).raise_for_status().json()
            print(mail)
            for answer in decision["answers"]:
                print(f"  {answer['name']}: {said(answer)}")
            cached += decision["usage"]["input_tokens_details"]["cached_tokens"]
            prompt += decision["usage"]["input_tokens"]
    print(f"{cached:,} of {prompt:,} prompt tokens came from the cache")


if __name__ == "__main__":
    main(*sys.argv[1:])
