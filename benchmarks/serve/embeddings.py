"""Embeddings of ``LLM.embed`` beside sentence-transformers: the same checkpoint, precision, texts and threads.

    python -m benchmarks.serve.embeddings [--texts 256] [--rounds 1] [--dtype bfloat16 float32] [--output FILE.json]

Needs sentence-transformers in this environment. The checkpoint is the default model in Hugging Face format, with the
files of an embedder (mean, length 1). Both embed the same texts of 30 to 300 tokens in turns, with new texts in each
round, so that nothing is in a cache; the library sorts them by length and takes batches of 32. The figure is the median
of the rounds' ratios of texts a second, and of their ratios of processor time, which other programs hardly change. The
largest difference of a value is told beside it. One round of 256 texts in bfloat16 is 84,000 tokens of both sides
together: a minute or two of two cores with AMX. In float32 it takes some five times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from benchmarks.serve.model_files import ModelForms
from benchmarks.serve.server import machine
from rootgraft import LLM
from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.text.tokenizer import Tokenizer

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
_WORDS = ("river", "stone", "paper", "light", "market", "engine", "winter", "letter", "garden", "signal", "bridge")


def write_checkpoint(folder: Path) -> Path:
    """Write the default model as an embedder."""
    path = ModelForms(resolve_model(None).path, folder).bfloat16()
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, kind in enumerate(("Pooling", "Normalize"), 1):
        place = f"{number}_{kind}"
        modules.append(
            {"idx": number, "name": str(number), "path": place, "type": f"sentence_transformers.models.{kind}"}
        )
        (path / place).mkdir()
    (path / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": 576, "pooling_mode_mean_tokens": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    return path


def texts_of(seed: int, count: int, tokenizer: Tokenizer) -> list[str]:
    """Return texts of 30 to 300 tokens."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        wanted, words = chance.randint(30, 300), [str(chance.random())]
        while len(tokenizer.encode(" ".join(words), True)) < wanted:
            words += chance.choices(_WORDS, k=8)
        found.append(" ".join(words))
    return found


def compare(folder: Path, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Embed in turns. Returns the rates, their ratios and the largest difference."""
    tokenizer = Tokenizer.load(folder)
    theirs = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    theirs.tokenizer.pad_token = theirs.tokenizer.eos_token
    with closing(LLM(str(folder), dtype=dtype, device="cpu", threads=options.threads, kv_cache_memory=1)) as ours:

        def embed_ours(texts: Sequence[str]) -> NDArray[np.float32]:
            return np.array([each.outputs.embedding for each in ours.embed(list(texts), use_tqdm=False)], np.float32)

        def embed_theirs(texts: Sequence[str]) -> NDArray[np.float32]:
            return np.asarray(theirs.encode(list(texts), batch_size=32), np.float32)

        sides: dict[str, Embed] = {"rootgraft": embed_ours, "sentence-transformers": embed_theirs}
        for embed in sides.values():
            embed(texts_of(0, 8, tokenizer))
        return rounds(sides, options, tokenizer)


def rounds(sides: dict[str, Embed], options: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Measure the sides in turns, each round with texts of its own."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    difference, num_tokens = 0.0, 0
    for number in range(options.rounds):
        texts = texts_of(number + 1, options.texts, tokenizer)
        num_tokens += sum(len(tokenizer.encode(each, True)) for each in texts)
        found = []
        for name in sides if number % 2 else reversed(sides):
            began, used = time.perf_counter(), time.process_time()
            found.append(sides[name](texts))
            rates[name].append(len(texts) / (time.perf_counter() - began))
            seconds[name].append(time.process_time() - used)
        difference = max(difference, float(np.abs(found[0] - found[1]).max()))
    ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
    processor = [theirs / ours for ours, theirs in zip(*seconds.values(), strict=True)]
    return {
        "texts_a_second": {name: [round(rate, 2) for rate in each] for name, each in rates.items()},
        "ratios": [round(each, 2) for each in ratios],
        "ratio": round(statistics.median(ratios), 2),
        "processor_seconds": {name: [round(each, 1) for each in listed] for name, listed in seconds.items()},
        "ratio_of_processor_time": round(statistics.median(processor), 2),
        "largest_difference": difference,
        "tokens": num_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(Path(scratch))
        found = {dtype: compare(folder, dtype, options) for dtype in options.dtype}
    versions = {name: version(name) for name in ("sentence-transformers", "transformers", "torch")}
    figures = {"texts": options.texts, "threads": options.threads, "load": os.getloadavg(), "versions": versions}
    record = {"machine": machine(), "embeddings": {**figures, **found}}
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["embeddings"], indent=1))


if __name__ == "__main__":
    main()
