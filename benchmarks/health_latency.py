"""Latency of ``/health`` while the server is given programs whose work doubles: schemas, templates, patterns.


    python -m benchmarks.health_latency [--asks 300] [--output FILE.json]

Each hostile input is sent again and again by two clients while ``/health`` is asked on one connection. Told are the
99th percentile and the longest for each, and beside them those of the server at rest, of before and after: what the
machine itself adds is in both. Exit code 1 where a 99th percentile is above 50 ms and above twice that at rest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fleet.fleet_harness import percentiles, serve_command, wait_ready
from benchmarks.hostile_programs import LOOPS, doubling, unevaluated
from benchmarks.serve.server import ROOT, Server, machine

ADAPTER = ROOT / "examples" / "adapters" / "pirate"
LIMIT_SECONDS = 0.05
PAUSE_SECONDS = 0.01
MEMORY = "{{ 'a' * 4000000000 }}"


def normalizers(count: int) -> dict[str, Any]:
    """Return a normalizer that doubles a text so many times."""
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return {"type": "Sequence", "normalizers": [double] * count}


def make_adapters(folder: Path) -> tuple[str, ...]:
    """Write adapters that bring programs. Returns their names."""
    for name in ("template", "template-memory", "pattern", "normalizer"):
        shutil.copytree(ADAPTER, folder / name)
    for name, template in (("template", LOOPS), ("template-memory", MEMORY)):
        (folder / name / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "pattern" / "adapter_config.json").read_text())
    config["rank_pattern"] = {"(((((((a?){64}){64}){64}){64}){64}){64}){64}": 4}
    (folder / "pattern" / "adapter_config.json").write_text(json.dumps(config))
    tokenizer = {
        "version": "1.0",
        "normalizer": normalizers(34),
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    }
    (folder / "normalizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return ("template", "template-memory", "pattern", "normalizer")


def inputs(model: str, adapters: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the bodies of hostile requests by name."""
    messages = [{"role": "user", "content": "aaaaaaaa"}]
    schemas = {
        "allOf, 12 levels": doubling("allOf", 12),
        "allOf, 22 levels": doubling("allOf", 22),
        "anyOf, 22 levels": doubling("anyOf", 22),
        "unevaluatedProperties, 30 levels": unevaluated(30),
    }
    found: dict[str, dict[str, Any]] = {"nothing, before": {}}
    for name, schema in schemas.items():
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        found[name] = {"model": model, "messages": messages, "response_format": form, "max_tokens": 24}
    found |= {f"adapter: {name}": {"model": name, "messages": messages, "max_tokens": 4} for name in adapters}
    return found | {"nothing, after": {}}


def measure(url: str, body: dict[str, Any], asks: int) -> dict[str, Any]:
    """Ask for health while a request is sent again and again; no request for an empty body."""
    ending, statuses = threading.Event(), Counter[int]()

    def send() -> None:
        with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
            while not ending.is_set():
                statuses[http.post("/chat/completions", json=body).status_code] += 1

    senders = [threading.Thread(target=send) for _ in range(2 if body else 0)]
    for sender in senders:
        sender.start()
    seconds = []
    with httpx.Client(base_url=url.removesuffix("/v1"), timeout=600, trust_env=False) as http:
        for _ in range(asks):
            begin = time.perf_counter()
            http.get("/health").raise_for_status()
            seconds.append(time.perf_counter() - begin)
            time.sleep(PAUSE_SECONDS)
    ending.set()
    for sender in senders:
        sender.join()
    return {"health_s": percentiles(seconds), "statuses": dict(statuses)}


def run(asks: int) -> dict[str, Any]:
    """Return all figures, and under ``holds`` whether each is right."""
    with tempfile.TemporaryDirectory() as name:
        adapters = make_adapters(Path(name))
        with Server(serve_command("--enable-lora", "--lora-dir", name)).running() as (url, process):
            wait_ready(url, process)
            model = httpx.get(f"{url}/models", trust_env=False).json()["data"][0]["id"]
            found = {each: measure(url, body, asks) for each, body in inputs(model, adapters).items()}
    rest = max(each["health_s"]["p99"] for name, each in found.items() if name.startswith("nothing"))
    holds = {name: each["health_s"]["p99"] <= max(LIMIT_SECONDS, 2 * rest) for name, each in found.items()}
    return {"holds": holds, "inputs": found}


def main() -> int:
    """Measure, print, write the file if one is named. Returns 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--asks", type=int, default=300, help="for health, during each input")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    command = f"python -m benchmarks.health_latency --asks {options.asks}"
    figures = {"command": command, "machine": machine()} | run(options.asks)
    text = json.dumps(figures, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return int(not all(figures["holds"].values()))


if __name__ == "__main__":
    sys.exit(main())
