"""Tree-shaped programs on our server, on the same server without its prefix cache, and on a peer.

    python benchmarks/programs/run.py
    python benchmarks/programs/run.py --model FOLDER --repeats 3 --output programs.json \\
        --peer-name vllm --peer 'env MODEL=FOLDER bash benchmarks/serve/peers/vllm.sh {port}'

Each server is started, warmed up, given all programs and stopped before the next one starts. Hits are what ``usage``
says of the prompts, as a share of the optimum computed from the same traffic (``optimum.py``). Then comes what cold
requests wait (``waiting.py``). The JSON file holds every repeat, commands, versions and the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.programs.optimum import Optimum, Recorder  # noqa: E402
from benchmarks.programs.waiting import cold_waits  # noqa: E402
from benchmarks.programs.workloads import PROGRAMS, run  # noqa: E402
from benchmarks.serve.server import Server, machine  # noqa: E402
from rootgraft.api.cli.remote_server import RemoteError  # noqa: E402
from rootgraft.engine.checkpoint.locate import resolve_model  # noqa: E402
from rootgraft.engine.text.tokenizer import Tokenizer  # noqa: E402
from rootgraft.programs import ProgramError, Session  # noqa: E402

Figures = dict[str, Any]


def main() -> int:
    args = _arguments()
    model = "" if args.model is None else f" {shlex.quote(args.model)}"
    ours = f"{shlex.quote(sys.executable)} -m rootgraft.api.cli.main serve{model} --port {{port}} --log-level warning"
    commands = {"rootgraft": ours, "no prefix cache": f"{ours} --no-enable-prefix-caching"}
    if args.peer:
        commands[args.peer_name] = args.peer
    tokenizer = Tokenizer.load(resolve_model(args.model).path)
    servers = {name: _measure(name, command, tokenizer, args) for name, command in commands.items()}
    waits = cold_waits()
    print(_table(servers))
    print("cold requests, ours / first come first served:", {name: round(value, 3) for name, value in waits.items()})
    document = {
        "what": __doc__.splitlines()[0],
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "machine": machine(),
        "versions": {"rootgraft": machine()["commit"], args.peer_name: _version(args.peer_version)},
        "programs": Path(__file__).with_name("workloads.py").read_text().split('"""')[1],
        "servers": servers,
        "cold_waits": waits,
    }
    Path(args.output).write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or file of the model, for our server and the tokenizer")
    parser.add_argument("--peer", help="command of the peer; {port} is filled in")
    parser.add_argument("--peer-name", default="peer", help="what the table calls it")
    parser.add_argument("--peer-version", help="command that prints the peer's version")
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds a server may take to answer")
    parser.add_argument("--output", default="programs.json")
    return parser.parse_args()


def _version(command: str | None) -> str | None:
    if command is None:
        return None
    return subprocess.run(shlex.split(command), capture_output=True, text=True, check=False).stdout.strip() or None


def _measure(name: str, command: str, tokenizer: Tokenizer, args: argparse.Namespace) -> Figures:
    """All programs on one server. Repeats of the programs take turns, so that what disturbs one disturbs all."""
    with Server(command).running() as (url, process):
        started = time.perf_counter()
        _wait_for(url, process, args.start_timeout)
        ready = time.perf_counter() - started
        optimum = Optimum(tokenizer)
        runs: dict[str, list[Figures]] = {program: [] for program in args.programs}
        for repeat in range(args.repeats):
            for program in args.programs:
                runs[program].append(_run(url, program, repeat, args.seed, optimum))
                print(f"{name} {program} {repeat}: {runs[program][-1]}", file=sys.stderr)
        return {"command": command, "first_answer_s": ready, "load_average": os.getloadavg(), "programs": runs}


def _wait_for(url: str, process: subprocess.Popen[bytes] | None, limit: float) -> None:
    """Until the server gives a whole answer of a form, which is its warm-up too."""
    deadline = time.monotonic() + limit
    while True:
        try:
            with Session(url) as session:
                session.user("Say a word.").gen("word", regex="[a-z]{3,8}", max_tokens=16)
                return
        except ProgramError as error:
            if time.monotonic() > deadline or (process is not None and process.poll() is not None):
                raise RemoteError("not reachable", f"The server at {url} gave no answer: {error}") from error
        time.sleep(0.3)


def _run(url: str, program: str, repeat: int, seed: int, optimum: Optimum) -> Figures:
    with Session(url) as session:
        recorder = session._backend = Recorder(session._backend)
        began = time.perf_counter()
        run(program, repeat, seed, session)
        wall = time.perf_counter() - began
        report = session.report()
    best = optimum.hits(recorder.calls)
    return {
        "wall_s": round(wall, 3),
        "calls": report.calls,
        "prompt_tokens": report.prompt,
        "hit_tokens": report.cached,
        "optimal_hit_tokens": best,
        "share_of_optimum": round(report.cached / best, 4),
        "forked_tokens": report.forked,
        "completion_tokens": report.completion,
        "tokens_per_s": round((report.prompt + report.completion) / wall, 1),
    }


def _table(servers: dict[str, Figures]) -> str:
    """Medians over the repeats, a line for each program and server."""
    lines = [f"{'':<12}{'':<18}{'seconds':>10}{'tokens/s':>10}{'prompt':>10}{'hits':>10}{'of optimum':>12}"]
    for program in next(iter(servers.values()))["programs"]:
        for name, figures in servers.items():
            runs = figures["programs"][program]
            seconds, speed, prompt, hits, share = (
                statistics.median(run[key] for run in runs)
                for key in ("wall_s", "tokens_per_s", "prompt_tokens", "hit_tokens", "share_of_optimum")
            )
            lines.append(
                f"{program:<12}{name:<18}{seconds:>10.2f}{speed:>10.0f}{prompt:>10.0f}{hits:>10.0f}{share:>12.1%}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
