"""Compare the base model and the three example adapters on the same prompts, as a Markdown table.

    python examples/compare_adapters.py [--score]

All answers come from one batch. With ``--score`` the table counts the solved held-out examples of each task instead,
by its adapter and by the base model with the task's instruction.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from adapters_data import Task, tasks

from rootgraft import LLM, SamplingParams

ADAPTERS = Path(__file__).parent / "adapters"
NAMES = ("pirate", "contact-card", "shell")
PROMPTS = (
    "How do I make a cup of tea?",
    "At the fair I talked with Vera Hughes of Copper Hill; her number is 555-0142.",
    "Display the last 15 lines of the file debug.log",
)


def main() -> None:
    """Print the comparison, or the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--score", action="store_true", help="count the solved held-out sentences")
    arguments = parser.parse_args()
    llm = load()
    print("\n".join(scores(llm) if arguments.score else comparison(llm)))
    llm.close()


def load() -> LLM:
    """The default model with the three adapters."""
    llm = LLM(enable_lora=True, max_model_len=1024)
    for name in NAMES:
        llm.load_adapter(name, str(ADAPTERS / name))
    return llm


def comparison(llm: LLM) -> list[str]:
    """A row for each prompt, a column for each model."""
    columns = [answers(llm, PROMPTS, adapter) for adapter in (None, *NAMES)]
    head = ["| prompt | base model | " + " | ".join(f"`{name}`" for name in NAMES) + " |", "|---|---|---|---|---|"]
    return head + [f"| {' | '.join(map(_cell, row))} |" for row in zip(PROMPTS, *columns, strict=True)]


def scores(llm: LLM) -> list[str]:
    """A row for each task: held-out examples solved by the base model and by the adapter."""
    lines = ["| task | held-out sentences | base model, told what to do | adapter |", "|---|---|---|---|"]
    for task in tasks():
        base, adapted = solved(llm, task, None), solved(llm, task, task.name)
        lines.append(f"| `{task.name}` | {len(task.held_out)} | {base} | {adapted} |")
    return lines


def solved(llm: LLM, task: Task, adapter: str | None) -> int:
    """Count the solved held-out examples; the base model gets the task's instruction."""
    instruction = None if adapter else task.instruction
    texts = answers(llm, [example.prompt for example in task.held_out], adapter, instruction)
    return sum(task.solves(text, example.answer) for text, example in zip(texts, task.held_out, strict=True))


def answers(llm: LLM, prompts: Sequence[str], adapter: str | None, instruction: str | None = None) -> list[str]:
    """Greedy answers to single messages."""
    system = [{"role": "system", "content": instruction}] if instruction else []
    conversations = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
    params = SamplingParams(max_tokens=80, temperature=0)
    outputs = llm.chat(conversations, params, adapter=adapter, use_tqdm=False)
    return [output.outputs[0].text.strip() for output in outputs]


def _cell(text: str) -> str:
    """A text in a cell of a Markdown table, on one line."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= 160 else f"{line[:157]}..."


if __name__ == "__main__":
    main()
