"""``rootgraft bench serve --sweep``: the loads of its levels, the knee, the table, the curves, and an early end."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.api.fake_openai import FakeServer
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.cli.bench_requests import TokenScale, mixed_requests
from rootgraft.api.cli.bench_serve import broken
from rootgraft.api.cli.main import main
from rootgraft.api.cli.options import MOST_CLIENTS, BenchOptions, parse_levels
from rootgraft.api.cli.sweep_chart import chart_svg, linear_ticks, log_ticks
from rootgraft.api.cli.sweep_report import Level, find_knee, sweep_table
from rootgraft.engine.errors import ConfigError

PROBES = 2  # requests that measure the tokens per word


def sweep(server: FakeServer, tmp_path: Path, *argv: str, code: int = 0) -> dict[str, Any]:
    path = tmp_path / "sweep.json"
    assert main(["bench", "serve", "--url", server.url, "--output-json", str(path), *argv]) == code
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def prompts(server: FakeServer) -> list[str]:
    return [body["messages"][0]["content"] for body in server.asked[PROBES:]]


def test_each_level_has_its_clients_and_prompts_of_its_own(
    fake_server: FakeServer, tmp_path: Path, capsys: Any
) -> None:
    result = sweep(fake_server, tmp_path, "--sweep", "1,3,5", "--input-len", "30")
    assert [level["clients"] for level in result["levels"]] == [1, 3, 5]
    assert [level["figures"]["completed"] for level in result["levels"]] == [16, 16, 20]
    assert fake_server.most_running <= 5
    assert len(set(prompts(fake_server))) == len(prompts(fake_server)) == 52
    assert {body["temperature"] for body in fake_server.asked} == {1.0}
    out = capsys.readouterr().out
    assert re.search(r"^ +3[ *]", out, re.MULTILINE) and "secret" not in json.dumps(result)


def test_each_run_has_a_seed_of_its_own_unless_one_is_given(
    fake_server: FakeServer, tmp_path: Path, capsys: Any
) -> None:
    seeds = [sweep(fake_server, tmp_path, "--sweep", "1")["options"]["seed"] for _ in range(2)]
    assert seeds[0] != seeds[1] and f"Seed {seeds[1]} (new prompts)" in capsys.readouterr().err
    assert len(set(prompts(fake_server)) - {body["messages"][0]["content"] for body in fake_server.asked[:2]}) >= 32
    first = prompts(fake_server)[:16]
    fake_server.asked.clear()
    sweep(fake_server, tmp_path, "--sweep", "1", "--seed", str(seeds[0]))
    assert prompts(fake_server) == first
    assert f"Seed {seeds[0]} (as given" in capsys.readouterr().err


def test_mixes_take_turns(fake_server: FakeServer, tmp_path: Path) -> None:
    mix = ("random", "shared-prefix", "schema", "adapters")
    argv = ("--mix", *mix, "--adapters", "sql", "law", "--num-prompts", "24", "--input-len", "20")
    sweep(fake_server, tmp_path, "--sweep", "2", *argv)
    bodies = fake_server.asked[PROBES:]
    assert Counter(body["model"] for body in bodies) == {"first": 18 + 2, "sql": 2, "law": 2}
    assert sum("response_format" in body for body in bodies) == 6
    texts = sorted((body["messages"][0]["content"] for body in bodies), key=len)[-6:]
    shared = {" ".join(text.split()[:500]) for text in texts}
    assert len(shared) == 1 and len(set(texts)) == 6, "a long part in common, and an end of its own"


def test_schemas_of_the_mix_are_schemas_and_are_named_in_the_prompt() -> None:
    requests = mixed_requests(BenchOptions(mix=("schema",), ignore_eos=True), TokenScale(4, 1), Random(1), 8)
    assert len({json.dumps(request.schema) for request in requests}) == 4
    for request in requests:
        assert request.schema is not None and "ignore_eos" not in request.body
        Draft202012Validator.check_schema(request.schema)
        assert request.body["response_format"]["json_schema"]["schema"] == request.schema
        assert all(key in request.body["messages"][0]["content"] for key in request.schema["properties"])


@pytest.mark.parametrize(
    ("text", "finish", "fault"),
    [
        ('{"a": 1}', "stop", None), ('{"a": "x"}', "stop", "breaks its schema"), ('{"a": 1', "length", "cut off"),
        ('{"a": 1', "stop", "not JSON"), ("Sure! {}", "stop", "not JSON"), ("", None, "not JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_answer(text: str, finish: str | None, fault: str | None) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert broken(schema, text, finish) == fault


def test_invalid_answers_are_counted_in_every_kind_of_run(fake_server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    level = sweep(fake_server, tmp_path, "--sweep", "2", "--mix", "schema", "random")["levels"][0]
    assert level["figures"]["invalid_answers"] == {"not JSON": 8}
    assert "Invalid answers: 8 not JSON" in capsys.readouterr().out
    figures = sweep(fake_server, tmp_path, "--num-prompts", "4", "--mix", "schema")["figures"]
    assert figures["invalid_answers"] == {"not JSON": 4}
    assert "     4  not JSON" in capsys.readouterr().out
    fake_server.pieces = ('{"mood": "glad", "reason"', ': "none", "strength": 3}')
    figures = sweep(fake_server, tmp_path, "--num-prompts", "4", "--mix", "schema")["figures"]
    assert figures["invalid_answers"] == {"breaks its schema": 3}, "one of the four is for this schema"


def test_failures_are_counted_by_level_and_named(fake_server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    fake_server.refuse = [None] * (PROBES + 16) + [429, None, 503, 503]
    result = sweep(fake_server, tmp_path, "--sweep", "1,2")
    assert [level["figures"]["errors"] for level in result["levels"]] == [{}, {"HTTP 503": 2, "HTTP 429": 1}]
    captured = capsys.readouterr()
    assert "Failed: 2 HTTP 503, 1 HTTP 429" in captured.out and "HTTP 429: The server returned" in captured.err


def test_a_level_without_an_answer_fails_the_run(fake_server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    fake_server.refuse = [None] * (PROBES + 16) + [500] * 16
    chart = tmp_path / "sweep.svg"
    result = sweep(fake_server, tmp_path, "--sweep", "1,2", "--output-chart", str(chart), code=1)
    assert result["levels"][1]["figures"]["ttft_ms"] is None
    assert ET.parse(chart).getroot().tag.endswith("svg")


def test_an_interrupt_leaves_what_was_measured(fake_server: FakeServer, tmp_path: Path) -> None:
    fake_server.stall_after = PROBES + 16 + 5
    path, chart = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    # A shell has what it runs in the background ignore the signal, and this process would hand that down.
    launch = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    launch += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    words = ["-m", "rootgraft.api.cli.main", "bench", "serve", "--url", fake_server.url, "--sweep", "1,2,4"]
    words += ["--output-json", str(path), "--output-chart", str(chart)]
    command = [sys.executable, "-c", launch, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/") as running:
        try:
            wait_until(lambda: len(fake_server.asked) == PROBES + 16 + 5 + 2 or running.poll() is not None)
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=HANG_SECONDS)
        finally:
            running.kill()
    assert running.returncode == 130, err
    levels = json.loads(path.read_text())["levels"]
    told = [(level["clients"], level["figures"]["completed"], level["interrupted"]) for level in levels]
    assert told == [(1, 16, False), (2, 5, True)]
    assert "    2!" in out and "Interrupted after 5 requests" in out and "Traceback" not in err
    assert chart.exists()


def level(clients: int, throughput: float, **figures: Any) -> Level:
    latencies = dict.fromkeys(("mean", "p50", "p95", "p99"), 12.0)
    made = {"output_tokens_per_s": throughput, "requests_per_s": throughput / 100, "requests": 16, "completed": 16}
    made |= {"ttft_ms": latencies, "itl_ms": latencies, "errors": {}, "invalid_answers": {}}
    return Level(clients, made | figures)


def test_the_knee_is_kneedles() -> None:
    """The example of its paper (Satopaa et al., 2011, figure 2): of ten points on -1 / (x + 0.1) + 5 the third.

    They are raised by ten, as speeds are above zero.
    """
    curve = [level(10 * number + 1, -1 / (number / 9 + 0.1) + 15) for number in range(10)]
    assert find_knee(curve) == 2


NOISY = {1: 11.6, 2: 21.4, 4: 20.0, 8: 27.5, 16: 43.8}


def test_a_server_that_is_full_at_four_clients() -> None:
    speeds = {1: 100, 2: 200, 4: 390, 8: 410, 16: 415, 32: 413, 64: 405}
    assert find_knee([level(clients, speed) for clients, speed in speeds.items()]) == 2


@pytest.mark.parametrize(
    "speeds",
    [{}, {1: 10}, {1: 10, 2: 15}, {1: 10, 2: 20, 3: 30, 4: 40}, {1: 7, 2: 7, 4: 7}, {1: 1, 2: 2, 4: 4, 8: 9}, NOISY],
)
def test_curves_without_a_knee(speeds: dict[int, float]) -> None:
    assert find_knee([level(clients, speed) for clients, speed in speeds.items()]) is None


def test_an_interrupted_level_counts_for_no_knee() -> None:
    speeds = {1: 100, 2: 200, 4: 390, 8: 410, 16: 415}
    whole = [level(clients, speed) for clients, speed in speeds.items()]
    assert find_knee([*whole, Level(32, level(32, 5000).figures, interrupted=True)]) == find_knee(whole)


@settings(max_examples=25)
@given(st.floats(1, 6e4), st.floats(0.1, 100))
def test_the_table_fits_eighty_columns(throughput: float, factor: float) -> None:
    slow = {"p50": 12.0 * factor, "p95": 9000 * factor, "p99": 9999.6}
    levels = [level(clients, throughput * clients, ttft_ms=slow) for clients in (1, 16)]
    levels.append(Level(4096, level(1, 1, ttft_ms=None, errors={"HTTP 503": 9999}, completed=0).figures, True))
    lines = sweep_table(levels, 1).splitlines()
    assert all(len(line) <= 80 for line in lines) and len(lines[3]) == len(lines[2]) == 80
    assert "\x1b" not in "".join(lines) and "\x1b[1m" in sweep_table(levels, 1, in_terminal=True)


def test_the_chart_is_an_svg_with_all_curves() -> None:
    levels = [level(clients, 100 * math.log2(clients + 1)) for clients in (1, 2, 4, 8, 16)]
    root = ET.fromstring(chart_svg(levels, 2, "a <model> & more"))
    name = "{http://www.w3.org/2000/svg}"
    texts = [node.text for node in root.iter(f"{name}text")]
    assert texts[0] == "a <model> & more" and texts.count("knee") == 3
    assert len(list(root.iter(f"{name}polyline"))) == 1 + 3 + 3
    assert all(texts.count(word) == 2 for word in ("p50", "p95", "p99"))
    for line in root.iter(f"{name}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 960 and 84 <= y <= 286, "inside of the frame"
    assert "prefers-color-scheme: dark" in chart_svg(levels, None, "")


@settings(max_examples=25)
@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=8))
def test_charts_of_any_numbers_are_drawn(speeds: list[float]) -> None:
    levels = [level(2**place, speed, itl_ms=None) for place, speed in enumerate(speeds)]
    text = chart_svg(levels, None, "x")
    assert "nothing was measured" in text and "nan" not in text and "inf" not in text
    ET.fromstring(text)


@settings(max_examples=25)
@given(st.floats(0.001, 1e7), st.floats(1, 1e5))
def test_ticks_enclose_the_values_and_are_few(low: float, factor: float) -> None:
    high = low * factor
    ticks = log_ticks(low, high)
    assert ticks[0] <= low * (1 + 1e-6) and ticks[-1] >= high * (1 - 1e-6) and 2 <= len(ticks) <= 13
    assert all(a < b for a, b in pairwise(ticks))
    straight = linear_ticks(high)
    assert straight[0] == 0 and straight[-1] >= high * (1 - 1e-6) and 2 <= len(straight) <= 7


def test_a_png_is_made_or_said_to_need_a_package(fake_server: FakeServer, tmp_path: Path, capsys: Any) -> None:
    chart = tmp_path / "sweep.png"
    code = main(["bench", "serve", "--url", fake_server.url, "--sweep", "1", "--output-chart", str(chart)])
    if find_spec("cairosvg") is None:
        assert code == 1 and "PNG needs cairosvg (pip install cairosvg)" in capsys.readouterr().err
    else:
        assert code == 0 and chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("1", (1,)), ("1,2,4,8", (1, 2, 4, 8)), ("1, 2, 4, ..., 64", (1, 2, 4, 8, 16, 32, 64)),
        ("1,2,...,32", (1, 2, 4, 8, 16, 32)), ("4,8,12,...,20", (4, 8, 12, 16, 20)),
        ("1,3,9,...,100", (1, 3, 9, 27, 81, 100)),
        ("2,3,...,6", (2, 3, 4, 5, 6)), (str(MOST_CLIENTS), (MOST_CLIENTS,)), ("5,7,...,11", (5, 7, 9, 11)),
    ],
)  # fmt: skip
def test_levels_of_a_sweep(text: str, levels: tuple[int, ...]) -> None:
    assert parse_levels(text) == levels


@pytest.mark.parametrize(
    "text",
    ["", "0", "1,1", "2,1", "1,x", "1,...,8", "1,2,...", "...,4", "1,2,...,2", "-1", "1.5", str(MOST_CLIENTS + 1),
     "1,2,...,99999", "2,1,...,8", "1,2,...,8,16", "1,,2", "0,0,...,5"],
)  # fmt: skip
def test_levels_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--sweep must be ascending numbers of clients from 1 to 4096"):
        parse_levels(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix": ("random", "chess")}, "--mix must be of random, shared-prefix, schema, adapters, not chess"),
        ({"mix": ()}, "--mix must name at least one"),
        ({"mix": ("adapters",)}, "--mix adapters and --adapters NAME... must be given together"),
        ({"adapters": ("a",)}, "--mix adapters and --adapters NAME... must be given together"),
        ({"mix": ("schema",), "endpoint": "completions"}, "--mix schema needs --endpoint chat"),
        ({"mix": ("schema",), "dataset": "x"}, "--mix is for random prompts"),
        ({"output_chart": "x.svg"}, "needs --sweep"),
        ({"sweep": "1", "output_chart": "x.gif"}, "must end in .svg or .png, not x.gif"),
        ({"sweep": "1", "dataset": "x"}, "--dataset cannot be used with --sweep"),
        ({"sweep": "1", "request_rate": 2.0}, "--request-rate cannot be used with --sweep"),
        ({"sweep": "1", "max_concurrency": 2}, "--max-concurrency cannot be used with --sweep"),
        ({"temperature": 2.1}, "--temperature must be at most 2"),
        ({"temperature": -0.1}, "--temperature must be at least 0"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        BenchOptions(**options)
