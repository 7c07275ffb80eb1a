"""An engine in this process over random weights in the shape of SmolLM2-135M, with a rope for long contexts."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rootgraft.engine.checkpoint.model_config import ModelConfig
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Abort, Done, Failed, LoadAdapter, Message, Reply, Submit, TokenOut
from rootgraft.engine.types import SamplingParams

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 65_536,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
SMALL = SHAPE | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
"""For quick forms: another shape of the same kind."""
_WARM = 6  # steps until passes are recorded


class RandomEngine:
    """Sequences of random tokens. Drafts are off: random answers repeat themselves, and a step has to be a step."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self.model: ModelConfig = read_model_config(folder)
        self.worker = Worker(config, folder)
        self._core = EngineCore(config, self.worker)
        self._random, self._ids = random.Random(0), itertools.count(1)
        self._live: list[int] = []

    def prompt(self, length: int) -> array[int]:
        """Return random tokens, none of them an end token."""
        return array("i", (self._random.randrange(3, self.model.vocab_size) for _ in range(length)))

    def start(self, prompts: Sequence[array[int]], adapters: Sequence[str | None] = (None,)) -> float:
        """Start sequences, with the adapters in turn. Returns the seconds until each has its first token."""
        params = SamplingParams(max_tokens=4096, temperature=1.0, ignore_eos=True)
        turns = itertools.cycle(adapters)
        rows = [Submit(next(self._ids), prompt, params, next(turns)) for prompt in prompts]
        missing = {row.id for row in rows}
        begin = time.perf_counter()
        self._core.handle(rows)
        while missing:
            missing -= {message.id for message in self._step() if isinstance(message, TokenOut)}
        self._live += [row.id for row in rows]
        return time.perf_counter() - begin

    def step_seconds(self, count: int) -> float:
        """Return the median seconds of a decode step of all that was started, after some to warm up."""
        times = []
        for _ in range(_WARM + count):
            begin = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[_WARM:])

    def stop(self) -> None:
        """End everything that was started."""
        self._core.handle([Abort(tuple(self._live))])
        missing = set(self._live)
        self._live.clear()
        while missing:
            missing -= {message.id for message in self._step() if isinstance(message, Done)}

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter. Raises RuntimeError if it is refused."""
        number = next(self._ids)
        self._core.handle([LoadAdapter(number, name, str(folder))])
        while True:
            for message in self._step():
                if isinstance(message, Reply) and message.id == number:
                    if message.failure is not None:
                        raise RuntimeError(message.failure)
                    return

    def close(self) -> None:
        self._core.close()

    def _step(self) -> list[Message]:
        messages = self._core.step()
        for message in messages:
            if isinstance(message, Failed):
                raise RuntimeError(f"A sequence failed: {message.message}")
        return messages


@contextlib.contextmanager
def random_engine(shape: dict[str, Any] = SHAPE, **options: Any) -> Iterator[RandomEngine]:
    """Load random weights of a shape for the time of a block; ``options`` are of ``EngineConfig``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = EngineConfig(
            model=folder,
            device="cpu",
            load_format="dummy",
            speculative_config='{"method": "off"}',
            **{"dtype": "bfloat16"} | options,
        )
        engine = RandomEngine(config, Path(folder))
        try:
            yield engine
        finally:
            engine.close()
