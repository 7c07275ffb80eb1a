"""Table of speeds: our server beside vLLM, llama.cpp and OpenVINO GenAI, like for like, by one command.

    python -m benchmarks.serve.table                    all classes with what is installed, about an hour
    python -m benchmarks.serve.table --quick            three workloads, one repeat, a few minutes
    python -m benchmarks.serve.table --server 'ours=rootgraft serve --port {port}' --server old=http://127.0.0.1:9000

The classes are those of ``benchmarks/serve/precision_classes.py``. Peers are looked for on PATH and where the scripts
in ``benchmarks/serve/peers`` install them; of those that are missing it is said how to get them. All servers of a class
run at once, and each repeat of a workload goes to each of them in turn. Requests are sampled at temperature 1 without
any filter; prompts are new in every run and repeat, so that no cache of an earlier one helps. Medians are shown.

The Markdown goes to the terminal, the JSON of ``benchmarks/results`` to ``--output``. Every repeat is appended to
``--output`` with the ending ``.runs.jsonl`` at once: the same command goes on where it was broken off.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import uvloop

from benchmarks import quality
from benchmarks.condense import render
from benchmarks.serve.alternate import Alternation, PrecisionClass, RunPlan
from benchmarks.serve.installed_peers import find_llama_server, find_openvino, find_vllm
from benchmarks.serve.model_files import ModelForms
from benchmarks.serve.precision_classes import CLASSES, Installed, given
from benchmarks.serve.run_record import RecordMismatch, RunRecord
from benchmarks.serve.server import machine
from benchmarks.serve.table_report import QUALITY_FORMS, TableReport, results
from benchmarks.serve.workloads import NAMES
from rootgraft.engine.checkpoint.locate import cache_folder, resolve_model
from rootgraft.kernels import ops

QUICK_WORKLOADS = ("W1", "W2", "W5")
_QUICK_WINDOWS = 2  # Windows of the text for quality in a quick run.


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        commands = dict(_named(each) for each in args.server)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    peers = None if commands else _installed(args)
    versions = {} if peers is None else {each.name: each.version for each in peers if each.path is not None}
    about = machine()
    settings = {"commit": about["commit"], "versions": versions, "quick": args.quick}
    try:
        record = _record(args, settings, about)
    except RecordMismatch as error:
        print(error, file=sys.stderr)
        return 2
    classes = _with_workloads([given(commands)] if peers is None else _classes(args, peers), args.workloads)
    plan = RunPlan(args.repeats, args.temperatures, args.budget, record.settings["seed"])
    for each in classes:
        uvloop.run(Alternation(each, plan, record).run())
    if peers is not None and not any(record.entries("quality")):
        record.add(quality=_quality(_QUICK_WINDOWS if args.quick else None))
    document = results(record, classes, args.temperatures)
    args.output.write_text("\n".join(render(document)) + "\n")
    print("\n\n".join(TableReport(record, classes, temperature).markdown() for temperature in args.temperatures))
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", default=list(CLASSES), choices=list(CLASSES))
    parser.add_argument("--workloads", nargs="+", choices=NAMES, help="default: all, or with --quick W1 W2 W5")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0], help="0 is greedy")
    parser.add_argument("--repeats", type=int, help="default: 3, with --quick 1")
    parser.add_argument(
        "--budget", type=float, default=180.0, help="seconds after which a workload on a server is not repeated"
    )
    parser.add_argument("--seed", type=int, help="seed of the prompts; default: a new one")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("table.json"))
    parser.add_argument(
        "--folder", type=Path, default=cache_folder().parent / "table", help="folder for models and peers"
    )
    parser.add_argument("--vllm", help="the command vllm, of a build for CPUs")
    parser.add_argument("--llama-server", help="llama.cpp's llama-server")
    parser.add_argument("--openvino-python", help="a Python with openvino-genai")
    parser.add_argument(
        "--server", action="append", default=[], metavar="NAME=COMMAND", help="instead of the classes; ours first"
    )
    args = parser.parse_args(argv)
    args.repeats = args.repeats or (1 if args.quick else 3)
    args.workloads = args.workloads or (QUICK_WORKLOADS if args.quick else NAMES)
    return args


def _named(text: str) -> tuple[str, str]:
    name, equals, command = text.partition("=")
    if not (name and equals and command):
        raise ValueError(f"--server must be NAME=COMMAND or NAME=ADDRESS, not {text}.")
    return name, command


def _installed(args: argparse.Namespace) -> Installed:
    """Find the peers, and say which are missing and how to get them."""
    folder = args.folder / "peers"
    peers = Installed(
        find_vllm(args.vllm, folder),
        find_llama_server(args.llama_server, folder),
        find_openvino(args.openvino_python, folder),
    )
    for peer in peers:
        print(f"{peer.name}: {peer.missing or peer.version or 'version unknown'}", file=sys.stderr)
    return peers


def _record(args: argparse.Namespace, settings: dict[str, object], about: dict[str, object]) -> RunRecord:
    """Return the record, whose seed and machine are those of its first line if it is continued."""
    path = args.output.with_suffix(".runs.jsonl")
    if args.seed is not None:
        settings |= {"seed": args.seed}
    first = {"seed": random.SystemRandom().randrange(1 << 31), **settings, "machine": about}
    return RunRecord(path, first, same=settings.keys())


def _classes(args: argparse.Namespace, peers: Installed) -> list[PrecisionClass]:
    forms = ModelForms(resolve_model(None).path, args.folder / "models")
    return [CLASSES[name](forms, peers) for name in args.classes]


def _with_workloads(classes: Sequence[PrecisionClass], names: Sequence[str]) -> list[PrecisionClass]:
    """Return the classes that have any of the workloads, with these alone."""
    found = [replace(each, workloads=[name for name in each.workloads if name in names]) for each in classes]
    return [each for each in found if each.workloads]


def _quality(windows: int | None) -> dict[str, object]:
    """Return what the quantised forms cost, beside bfloat16."""
    path = resolve_model(None).path
    ops.set_threads(torch.get_num_threads())
    texts = quality.windows(path)[:windows]
    lines = quality.measure(path, texts, ["float32", "bfloat16", *QUALITY_FORMS])
    return {"tokens": len(texts) * quality.WINDOW, "forms": [asdict(line) for line in lines]}


if __name__ == "__main__":
    sys.exit(main())
