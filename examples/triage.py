"""Typed decisions about mails: the base model picks a team, and an adapter is asked beside it, over the same text.

rootgraft serve --enable-lora --lora-modules pirate=examples/adapters/pirate
python triage.py [URL] [ADAPTER]
"""

import sys

from openai import OpenAI

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


def said(answer: dict[str, object]) -> str:
    """Return what an answer decides, with the shares of its labels."""
    if answer["type"] == "predicate":
        return f"{answer['probability']:.0%}"
    shares = [f"{each.get('label', each['value'])} {each['probability']:.0%}" for each in answer["probabilities"]]  # type: ignore[attr-defined]
    return ", ".join(shares)


def main(url: str = "http://127.0.0.1:8000/v1", adapter: str = "pirate") -> None:
    """Print each answer with its probability, and how many prompt tokens came from the cache."""
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    cached = prompt = 0
    for mail in MAILS:
        asked = questions(adapter)
        decision = client.decisions.create(model=model, input=mail, questions=asked)  # type: ignore[arg-type]
        print(mail)
        for question, answer in zip(asked, decision.answers, strict=True):
            print(f"  {question['name']}: {said(answer.to_dict())}")
        cached += decision.usage.input_tokens_details.cached_tokens
        prompt += decision.usage.input_tokens
    print(f"{cached:,} of {prompt:,} prompt tokens came from the cache")


if __name__ == "__main__":
    main(*sys.argv[1:])
