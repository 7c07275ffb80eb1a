"""``rootgraft bench serve``: load an OpenAI-compatible server at a given request rate and concurrency.

The client does little work per arrival of text (two clock readings, one JSON object), because it often shares its
cores with the measured server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import orjson
import uvloop
from tqdm import tqdm

from ...engine.errors import ConfigError
from .bench_report import summarise, table
from .options import BenchOptions, RemoteOptions
from .remote_server import RemoteError, RemoteServer, Timing, timed

_ENDPOINTS = {"chat": "chat/completions", "completions": "completions"}
_PROBE_WORDS = (16, 144)
# Short frequent words: in nearly every tokenizer each is one token, together with the space before it.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body "
    "information back parent face others level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education foot boy age policy music market"
)
_WORDS = _TEXT.split()


def bench_serve(remote: RemoteOptions, options: BenchOptions) -> int:
    """Run the load, print the table and write the JSON file. Returns 1 if no request was completed, else 0."""
    model, timings = uvloop.run(_run(remote, options))
    figures = summarise(timings)
    print(table(figures))
    if options.output_json is not None:
        _write(Path(options.output_json), remote, options, model, figures, timings)
    _explain_errors(timings)
    return 0 if figures["completed"] else 1


async def _run(remote: RemoteOptions, options: BenchOptions) -> tuple[str, list[Timing]]:
    extra = extra_fields(options.extra_body)
    async with RemoteServer.connect(remote) as server:
        if options.dataset is None:
            bodies = random_bodies(options, await _measure_scale(server, options, extra))
        else:
            bodies = dataset_bodies(options, Path(options.dataset))
        return server.model, await run_load(
            server, _ENDPOINTS[options.endpoint], [body | extra for body in bodies], options
        )


async def _measure_scale(server: RemoteServer, options: BenchOptions, extra: dict[str, Any]) -> TokenScale:
    """Send two requests of one token, which warm the server up and measure the tokens per word."""
    measured = []
    for count in _PROBE_WORDS:
        body = body_for(words(Random(count), count), 1, options) | extra
        timing = await timed(server, _ENDPOINTS[options.endpoint], body)
        if timing.error is not None:
            raise RemoteError(timing.error, timing.message or timing.error)
        measured.append((count, timing.prompt))
    return TokenScale.fit(measured[0], measured[1])


async def run_load(
    server: RemoteServer, path: str, bodies: Sequence[dict[str, Any]], options: BenchOptions
) -> list[Timing]:
    """Send all requests at the rate and concurrency of ``options``; return timings in the order of ``bodies``."""
    limit = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else contextlib.nullcontext()
    arrivals = _arrivals(len(bodies), options.request_rate, options.seed)
    start = asyncio.get_running_loop().time()
    # The progress bar goes to stderr, and only in a terminal: stdout holds only the table.
    with tqdm(total=len(bodies), unit="req", disable=not sys.stderr.isatty(), leave=False) as bar:

        async def send(body: dict[str, Any], arrival: float) -> Timing:
            await asyncio.sleep(start + arrival - asyncio.get_running_loop().time())
            async with limit:
                timing = await timed(server, path, body)
            bar.update()
            return timing

        return await asyncio.gather(*map(send, bodies, arrivals))


def _arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Arrival times in seconds after the start: a Poisson process, or all 0 for rate inf."""
    rng, now, times = Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate) if rate != float("inf") else 0.0
    return times


def _write(
    path: Path,
    remote: RemoteOptions,
    options: BenchOptions,
    model: str,
    figures: dict[str, Any],
    timings: Sequence[Timing],
) -> None:
    """Write the file of ``--output-json``: options without the key, figures, and every timing."""
    shown = {"url": remote.url, "model": model, **asdict(options)}
    document = {"options": shown, "figures": figures, "timings": [asdict(timing) for timing in timings]}
    try:
        path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise ConfigError(f"--output-json: {path} cannot be written: {error.strerror}.") from error


def _explain_errors(timings: Sequence[Timing]) -> None:
    for kind, message in {timing.error: timing.message for timing in timings if timing.error}.items():
        print(f"{kind}: {message}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class TokenScale:
    """Tokens of a prompt by the server's tokenizer: ``fixed + per_word * words``."""

    fixed: float
    per_word: float

    @classmethod
    def fit(cls, few: tuple[int, int], many: tuple[int, int]) -> TokenScale:
        """Line through two measurements (words, tokens); one token per word if the server reports no usage."""
        if few[1] <= 0 or many[1] <= few[1]:
            return cls(0.0, 1.0)
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        return cls(few[1] - per_word * few[0], per_word)

    def words(self, tokens: int, *, fixed: bool) -> int:
        """Number of words for about ``tokens`` tokens, less the fixed part if ``fixed``; at least one."""
        return max(1, round((tokens - (self.fixed if fixed else 0)) / self.per_word))


def words(rng: Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def body_for(text: str, max_tokens: int, options: BenchOptions) -> dict[str, Any]:
    """Request body for one prompt, for ``options.endpoint``."""
    prompt = {"messages": [{"role": "user", "content": text}]} if options.endpoint == "chat" else {"prompt": text}
    return _with_fields(prompt, max_tokens, options)


def random_bodies(options: BenchOptions, scale: TokenScale) -> list[dict[str, Any]]:
    """``num_prompts`` request bodies with a shared prefix of ``shared_prefix_len`` tokens. Deterministic per seed."""
    rng = Random(options.seed)
    prefix = ""
    if options.shared_prefix_len:
        prefix = words(rng, scale.words(options.shared_prefix_len, fixed=True)) + " "
    own = scale.words(options.input_len, fixed=not prefix)
    return [body_for(prefix + words(rng, own), options.output_len, options) for _ in range(options.num_prompts)]


def dataset_bodies(options: BenchOptions, path: Path) -> list[dict[str, Any]]:
    """Read the first ``num_prompts`` requests of a file of JSON lines. Raises ``ConfigError`` for an invalid line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset: {path} cannot be read as a text file.") from error
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][: options.num_prompts]
    if not rows:
        raise ConfigError(f"--dataset: {path} holds no requests.")
    return [_row_body(number, line, options) for number, line in rows]


def _row_body(number: int, line: str, options: BenchOptions) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except ValueError as error:
        raise ConfigError(f"--dataset: line {number} is not JSON: {error}.") from error
    length = row.get("output_len", options.output_len) if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(length, int) or length < 1:
        raise ConfigError(f"--dataset: line {number} must be an object; its output_len a whole number of at least 1.")
    if isinstance(row.get("prompt"), str):
        return body_for(row["prompt"], length, options)
    if isinstance(row.get("messages"), list) and options.endpoint == "chat":
        return _with_fields({"messages": row["messages"]}, length, options)
    expected = "prompt (a text) or messages (a list)" if options.endpoint == "chat" else "prompt (a text)"
    raise ConfigError(f"--dataset: line {number} has no {expected}.")


def _with_fields(prompt: Mapping[str, Any], max_tokens: int, options: BenchOptions) -> dict[str, Any]:
    ignore_eos = {"ignore_eos": True} if options.ignore_eos else {}
    return {**prompt, "max_tokens": max_tokens, "temperature": 0, **ignore_eos}


def extra_fields(text: str | None) -> dict[str, Any]:
    """Parse ``--extra-body``. Raises ``ConfigError`` if it is not a JSON object."""
    try:
        extra = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}.") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body must be a JSON object, not {text}.")
    return extra
