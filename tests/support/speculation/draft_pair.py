"""An engine without drafts and one with, on the same real model and kernels, and requests of all kinds for both."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, LoadAdapter, Submit, TokenOut
from rootgraft.engine.speculation.model_drafter import ModelDrafter
from rootgraft.engine.types import Logprob, SamplingParams
from rootgraft.kernels import ops

Answer = tuple[list[int], list[Logprob], str]
Asked = tuple[list[int], dict[str, Any], str | None]


class DraftPair:
    """Engines by ``"off"`` and ``"on"``, with the adapter "large".

    Args:
        folder: of `support.models.adapted_llama`, or of another base beside an adapter of it.
        drafts: the speculative config of the second engine.
        base: the folder of the base in it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        native: bool,
        drafts: dict[str, Any],
        pages: int = 200,
        eager: bool = False,
        base: str = "llama",
    ) -> None:
        self.native = native
        self.cores: dict[str, EngineCore] = {}
        for name, speculative in (("off", {"method": "off"}), ("on", drafts)):
            config = EngineConfig(
                dtype="float32", device="cpu", threads=1, max_num_seqs=4, max_num_batched_tokens=32,
                num_gpu_blocks_override=pages, native_kernels=native, enforce_eager=eager, enable_lora=True,
                max_loras=2, speculative_config=json.dumps(speculative),
            )  # fmt: skip
            self.cores[name] = EngineCore.load(config, folder / base)
            self.cores[name].handle([LoadAdapter(1000, "large", str(folder / "large"))])
            while self.cores[name].has_work:
                self.cores[name].step()

    def run(self, name: str, asked: list[Asked]) -> list[Answer]:
        """What each request got, all of them at once."""
        ops.use_native(self.native)
        core = self.cores[name]
        for number, (prompt, params, adapter) in enumerate(asked):
            core.handle([Submit(number, array("i", prompt), SamplingParams(**params), adapter=adapter)])
        got: dict[int, tuple[list[int], list[Logprob]]] = {i: ([], []) for i in range(len(asked))}
        ends: dict[int, str] = {}
        while core.has_work:
            for message in core.step():
                if isinstance(message, TokenOut):
                    got[message.id][0].extend(message.tokens)
                    got[message.id][1].extend(message.logprobs)
                elif isinstance(message, Done):
                    ends[message.id] = message.reason
            core.check()
        return [(*got[i], ends[i]) for i in range(len(asked))]


def watch_proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], str | None, list[int]]]:
    """What a head proposes from now on: behind which tokens, with which adapter's content, and the drafts."""
    found: list[tuple[list[int], str | None, list[int]]] = []
    inner = ModelDrafter.draft

    def watched(self: ModelDrafter, limits: Any) -> dict[int, list[int]]:
        limits = list(limits)
        asked = {sequence.id: sequence for sequence, _ in limits}
        drafts = inner(self, limits)
        for number, tokens in drafts.items():
            namespace = asked[number].path.namespace
            found.append((asked[number].tokens.tolist(), namespace.adapter, list(tokens)))
        return drafts

    monkeypatch.setattr(ModelDrafter, "draft", watched)
    return found


def requests(seed: int, vocab: int = 60) -> list[Asked]:
    """Prompts that repeat themselves, so that there is something to guess, and parameters of all kinds."""
    rng = random.Random(seed)
    asked: list[Asked] = []
    for _ in range(6):
        phrase = [rng.randrange(vocab) for _ in range(rng.randint(2, 9))]
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 0.7, "seed": rng.randrange(1000)},
            {"temperature": 1.0, "seed": 3, "top_p": 0.5, "top_k": 5},
            {"repetition_penalty": 1.3},
            {"frequency_penalty": 0.4, "presence_penalty": -0.3},
            {"logit_bias": ((phrase[0], 4.0), (phrase[1], -3.0)), "temperature": 0.3, "seed": 1},
            {"stop_token_ids": (phrase[0], 5, 17), "min_tokens": rng.choice([0, 6])},
        ]
        params = {"temperature": 0.0, "max_tokens": rng.randint(1, 40), "logprobs": 3, **rng.choice(kinds)}
        if rng.random() < 0.5:
            params["logprobs"] = None
        asked.append((phrase * rng.randint(1, 6), params, rng.choice([None, "large"])))
    return asked
