"""Models of the sizes that people use: each form's load and steps, beside what the machine can read and multiply.

    python -m benchmarks.big_models --models 1.5b 8b [--forms bf16 int8 q4_0-dynamic ...] [--output big.json]
    python -m benchmarks.big_models --make q4_0-dynamic --models 8b --keep     the file alone, to serve it

Weights are random, in the shapes of Qwen2.5-1.5B and Llama-3.1-8B; tokenizer and chat template are those of the default
model. Each form is measured in a process of its own: seconds of its load and the most memory meanwhile; a step of one
stream (W1) over the time of reading its weights; a prompt of 511 tokens over the time of its products; a step of 32
streams; and W2, 32 prompts of 100 tokens and 128 steps, with eight adapters over W2 without. Shares are of rates that
are measured in the same process, that of products right before each prompt: 1 is the limit. Products are those of the
form: the model's own layers, packed as they are, with 512 rows again and again, of which the fastest counts; and beside
it those of bfloat16.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.big_models.measure_form import FormTimes, measure_form, write_form_adapters
from benchmarks.big_models.model_forms import FORMS, make_file, remove_file
from benchmarks.big_models.model_shapes import SHAPES
from benchmarks.serve.server import machine
from rootgraft.engine.checkpoint.locate import cache_folder
from rootgraft.engine.checkpoint.read_config import read_model_config

_COLUMNS = {
    "load, s": "load",
    "peak memory, GiB": "peak_memory",
    "weights, GiB": "weights",
    "loading": "loading",
    "W1, ms": "decode",
    "of the reading rate": "decode_share",
    "prompt of 511, ms": "prefill",
    "of the product rate": "prefill_share",
    "of bfloat16's": "prefill_speed",
    "32 rows, ms": "batch",
    "of their limit": "batch_share",
    "W2 with adapters": "with_adapters",
}
_MILLISECONDS = ("decode", "prefill", "batch")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.big_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=["1.5b"], choices=list(SHAPES))
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--make", nargs="+", choices=list(FORMS), help="write the files of these forms and end")
    parser.add_argument("--folder", type=Path, default=cache_folder().parent / "big-models", help="for their files")
    parser.add_argument("--keep", action="store_true", help="leave the files there")
    parser.add_argument("--adapters", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=15, help="of which a median is taken")
    parser.add_argument("--output", type=Path, help="JSON file; what it holds of other forms is kept")
    args = parser.parse_args(argv)
    if args.make:
        for model in args.models:
            print(*(make_file(args.folder, model, FORMS[name].file) for name in args.make), sep="\n")
        return 0
    known = json.loads(args.output.read_text())["forms"] if args.output and args.output.exists() else {}
    print(f"| model | {' | '.join(_COLUMNS)} |\n|---{'|---' * len(_COLUMNS)}|", flush=True)
    for model in args.models:
        for number, name in enumerate(args.forms):
            times = _measured(args, model, name)
            if not args.keep and FORMS[name].file not in {FORMS[later].file for later in args.forms[number + 1 :]}:
                remove_file(make_file(args.folder, model, FORMS[name].file))
            known[f"{model} {name}"] = {key: value and float(f"{value:.4g}") for key, value in asdict(times).items()}
            print(_row(f"{model} {name}", times), flush=True)
            if args.output:
                args.output.write_text(json.dumps({"machine": machine(), "forms": known}, indent=1) + "\n")
    return 0


def _measured(args: argparse.Namespace, model: str, name: str) -> FormTimes:
    """Write a form's files, and measure it in a process of its own, whose memory is its alone."""
    path, adapters = make_file(args.folder, model, FORMS[name].file), None
    if args.adapters:
        adapters = args.folder / f"{model}-adapters"
        write_form_adapters(adapters, read_model_config(path))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_form, path, FORMS[name], adapters, args.steps).result()


def _row(name: str, times: FormTimes) -> str:
    values = ((key, getattr(times, key)) for key in _COLUMNS.values())
    cells = ("" if value is None else f"{value * (1e3 if key in _MILLISECONDS else 1):.3g}" for key, value in values)
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
