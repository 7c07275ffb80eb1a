"""``rootgraft bench serve``: the load that it makes, what it measures, and what it says of failures."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from pathlib import Path
from random import Random

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.fake_openai import FakeServer

from rootgraft.api.cli.bench_report import percentile, summarise
from rootgraft.api.cli.bench_requests import TokenScale, mixed_requests
from rootgraft.api.cli.bench_serve import _arrivals
from rootgraft.api.cli.main import main
from rootgraft.api.cli.options import BenchOptions
from rootgraft.api.cli.remote_server import RemoteError, Timing, _events


def bench(server: FakeServer, tmp_path: Path, *argv: str) -> dict:
    path = tmp_path / "figures.json"
    main(["bench", "serve", "--url", server.url, "--output-json", str(path), *argv])
    return json.loads(path.read_text())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_random_prompts_have_the_length_asked_for(endpoint: str, fake_server: FakeServer, tmp_path, capsys) -> None:
    lengths = ("--input-len", "61", "--shared-prefix-len", "103", "--output-len", "9")
    result = bench(fake_server, tmp_path, "--num-prompts", "5", "--endpoint", endpoint, *lengths)
    assert result["figures"]["completed"] == 5
    assert [timing["prompt"] for timing in result["timings"]] == pytest.approx([164] * 5, abs=2)
    assert {body["max_tokens"] for body in fake_server.asked[2:]} == {9}
    assert all("ignore_eos" not in body for body in fake_server.asked)
    assert "5 of 5" in capsys.readouterr().out


def test_the_report_counts_tokens_hits_and_reasons(fake_server: FakeServer, tmp_path, capsys) -> None:
    result = bench(fake_server, tmp_path, "--num-prompts", "4", "--ignore-eos", "--extra-body", '{"top_k": 3}')
    figures = result["figures"]
    assert (figures["output_tokens"], figures["cached_tokens"]) == (12, 8)
    assert all(body["ignore_eos"] and body["top_k"] == 3 for body in fake_server.asked)
    assert all(timing["finish"] == "stop" and len(timing["gaps"]) == 2 for timing in result["timings"])
    assert "secret" not in json.dumps(result)


def test_concurrency_is_kept(fake_server: FakeServer, tmp_path, capsys) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text('{"prompt": "x"}\n' * 20)
    fake_server.together = 3
    result = bench(fake_server, tmp_path, "--dataset", str(load), "--max-concurrency", "3")
    assert fake_server.most_running == 3
    assert result["figures"]["completed"] == 20


def test_failures_are_counted_by_kind(fake_server: FakeServer, tmp_path, capsys) -> None:
    fake_server.refuse = [None, None, 503, None, 429, 503]
    result = bench(fake_server, tmp_path, "--num-prompts", "6", "--max-concurrency", "1")
    assert result["figures"]["errors"] == {"HTTP 503": 2, "HTTP 429": 1}
    assert result["figures"]["completed"] == 3
    captured = capsys.readouterr()
    assert "     2  HTTP 503" in captured.out
    assert "HTTP 503: The server returned HTTP 503: no room now" in captured.err


def test_a_server_that_does_not_count(fake_server: FakeServer, tmp_path, capsys) -> None:
    fake_server.counts = False
    figures = bench(fake_server, tmp_path, "--num-prompts", "2")["figures"]
    assert (figures["output_tokens"], figures["cached_tokens"]) == (6, None)
    assert "not reported" in capsys.readouterr().out


def test_a_run_without_any_answer_fails(fake_server: FakeServer, tmp_path, capsys) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt": "x"}')
    fake_server.cut = True
    assert main(["bench", "serve", "--url", fake_server.url, "--dataset", str(path)]) == 1
    assert "broken off" in capsys.readouterr().out


def test_a_dataset_replaces_random_prompts(fake_server: FakeServer, tmp_path, capsys) -> None:
    rows = [{"prompt": "one", "output_len": 5}, {"messages": [{"role": "user", "content": "two"}]}, {"prompt": "three"}]
    path = tmp_path / "load.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)))
    bench(fake_server, tmp_path, "--dataset", str(path), "--num-prompts", "2", "--output-len", "8")
    asked = sorted((body["messages"][0]["content"], body["max_tokens"]) for body in fake_server.asked)
    assert asked == [("one", 5), ("two", 8)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 must be an object"),
        (
            '{"prompt": "x", "output_len": 0}',
            "line 2 must be an object; its output_len must be a whole number of at least 1",
        ),
        ('{"prompt": 5}', "line 2 has no prompt (a string) or messages (a list)"),
    ],
)
def test_a_dataset_that_is_none(line: str, message: str, fake_server: FakeServer, tmp_path, capsys) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n')
    assert main(["bench", "serve", "--url", fake_server.url, "--dataset", str(path)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("extra", "message"), [("{", "is not JSON"), ("[]", "must be a JSON object")])
def test_an_extra_body_that_is_none(extra: str, message: str, fake_server: FakeServer, capsys) -> None:
    assert main(["bench", "serve", "--url", fake_server.url, "--extra-body", extra]) == 1
    assert message in capsys.readouterr().err


def test_the_same_seed_makes_the_same_load() -> None:
    scale = TokenScale(4.0, 1.0)
    options = BenchOptions(shared_prefix_len=30)
    same = [mixed_requests(options, scale, Random(seed), 100) for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]
    texts = [request.body["messages"][0]["content"] for request in same[0]]
    assert len(set(texts)) == len(texts)
    assert len({" ".join(text.split()[:26]) for text in texts}) == 1


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array(_arrivals(20_000, 8.0, seed=3))
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05)
    assert _arrivals(3, math.inf, seed=0) == [0, 0, 0]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


def test_latencies_by_hand() -> None:
    timings = [
        Timing(started=10.0, ended=11.0, ttft=0.2, gaps=[0.1, 0.3], prompt=7, cached=None, completion=5),
        Timing(started=10.5, ended=12.0, ttft=0.4, gaps=[], prompt=3, cached=3, completion=1),
        Timing(started=10.6, ended=15.0, error="HTTP 503"),
    ]
    figures = summarise(timings)
    assert figures["duration_s"] == 5.0
    assert figures["output_tokens_per_s"] == pytest.approx(6 / 5)
    assert figures["ttft_ms"]["mean"] == pytest.approx(300)
    assert figures["tpot_ms"]["p50"] == pytest.approx(100)
    assert figures["itl_ms"]["p90"] == pytest.approx(280)
    assert figures["e2e_ms"]["p99"] == pytest.approx(1495)


class Chunks:
    """A body that arrives in given pieces."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks

    async def iter_any(self):
        for chunk in self.chunks:
            yield chunk


async def read(chunks: list[bytes]) -> list[dict]:
    return [event async for event in _events(Chunks(chunks))]


@given(st.data())
def test_events_survive_any_cut_of_the_stream(data: st.DataObject) -> None:
    events = data.draw(st.lists(st.fixed_dictionaries({"text": st.text()}), max_size=4))
    end = data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    whole = (
        b"".join(b": ping\nevent: x\ndata: " + orjson.dumps(event) + end for event in events) + b"data: [DONE]" + end
    )
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=8)) | {0, len(whole)})
    chunks = [whole[a:b] for a, b in itertools.pairwise(cuts)]
    assert asyncio.run(read(chunks)) == events


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (b'data: {"a": 1}\n\n', "broken off"),
        (b"data: oops\n\n", "not an event"),
        (b"data: 5\n\n", "not an event"),
        (b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n', "error in the stream"),
    ],
)
async def test_a_stream_that_goes_wrong(stream: bytes, kind: str) -> None:
    with pytest.raises(RemoteError) as caught:
        await read([stream])
    assert caught.value.kind == kind
