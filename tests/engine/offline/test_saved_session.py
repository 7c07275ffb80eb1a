"""A request that is paused, written to a file and resumed elsewhere goes on token for token, or not at all."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.engine.core_hooks import core_of
from support.engine.tiny_llm import open_llm, write_adapter, write_model
from support.machine.thoroughness import repeats

from rootgraft import LLM, SamplingParams
from rootgraft.engine.errors import EngineError, RequestError
from rootgraft.engine.kv_cache.block_codec import PREAMBLE_BYTES, SEAL_BYTES, block_checksum, block_size, check_preamble
from rootgraft.engine.kv_cache.session_files import pack_head, read_head
from rootgraft.engine.offline.running_request import RunningRequest
from rootgraft.engine.serving.output_processor import TextDelta
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.sampling_params import StructuredOutputsParams

PROMPT = [random.Random(f"5 {each}").randrange(3, 250) for each in range(40)]
LISTS = GrammarSpec.json_schema({"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3, "maxItems": 6})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("session")
    return write_model(root / "model"), write_adapter(root / "one", 1), write_adapter(root / "two", 2)


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path, Path]) -> Iterator[tuple[LLM, LLM]]:
    """Two engines with the same adapter under the same name."""
    opened = [open_llm(folders[0], enable_lora=True) for _ in range(2)]
    for llm in opened:
        llm.load_adapter("own", str(folders[1]))
    yield opened[0], opened[1]
    for llm in opened:
        llm.close()


def ended(llm: LLM, running: RunningRequest) -> tuple[list[int], str, Any]:
    while not running.is_done:
        llm.step()
    [answer] = running.output().outputs
    return list(answer.token_ids), answer.text, answer.finish_reason


def paused(llm: LLM, file: Path, num_tokens: int, **options: Any) -> None:
    """Begin a request, and write it to a file once it has so many tokens."""
    got: list[int] = []
    running = llm.begin(PROMPT, on_delta=lambda delta: got.extend(delta.tokens), **options)
    while len(got) < num_tokens:
        llm.step()
    assert not running.is_done, "drafts were too good"
    assert llm.save_session(running, file) >= 32
    with pytest.raises(RequestError, match="aborted"):
        running.output()


OPTIONS: list[dict[str, Any]] = [
    {"params": SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)},
    {"params": SamplingParams(max_tokens=40, temperature=1.5, seed=7, ignore_eos=True, presence_penalty=1.0)},
    {"params": SamplingParams(max_tokens=40, temperature=1.0, seed=3), "grammar": LISTS},
    {"params": SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True), "adapter": "own"},
    {"params": SamplingParams(max_tokens=40, temperature=1.0, seed=4, ignore_eos=True), "stop": ["zq", "qz"]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "drawn", "grammar", "adapter", "stop"])
def test_it_goes_on_elsewhere_with_the_same_tokens(pair: tuple[LLM, LLM], tmp_path: Path, options: Any) -> None:
    here, there = pair
    whole = ended(here, here.begin(PROMPT, **options))
    file = tmp_path / "session"
    for cut in (1, len(whole[0]) // 3):
        paused(here, file, cut, **options)
        there.reset_prefix_cache()
        deltas: list[TextDelta] = []
        running = there.load_session(file, on_delta=deltas.append)
        assert running is not None and ended(there, running) == whole
        assert [token for delta in deltas for token in delta.tokens] == whole[0], "what it had before comes first"
        assert running.output().num_cached_tokens >= 32, "its KV came with it"
        assert running.output().usage[0].completion >= len(whole[0])
    for llm in pair:
        core_of(llm).check()


def test_a_request_with_field_probabilities_is_not_paused(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    """The probabilities of the tokens from before the pause would be missing in those of their fields."""
    form = StructuredOutputsParams(json={"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3})
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, structured_outputs=form, field_probabilities=True)
    running = pair[0].begin(PROMPT, params)
    for _ in range(1000):
        pair[0].step()
        if core_of(pair[0]).find(next(iter(running.running), 0)) is not None:
            break
    with pytest.raises(RequestError, match="without logprobs and field_probabilities"):
        pair[0].save_session(running, tmp_path / "session")
    ended(pair[0], running)
    [answer] = running.output().outputs
    assert len(answer.field_probabilities or ()) >= len(json.loads(answer.text))


def test_without_a_seed_it_keeps_the_one_that_it_got(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    here, there = pair
    options = {"params": SamplingParams(max_tokens=30, temperature=2.0, ignore_eos=True)}
    paused(here, tmp_path / "session", 4, **options)
    answers = [ended(llm, llm.load_session(tmp_path / "session")) for llm in (here, there)]  # type: ignore[arg-type]
    assert answers[0] == answers[1] and len(answers[0][0]) == 30


def test_with_a_foreign_adapter_or_a_damaged_file_it_does_not_go_on(
    pair: tuple[LLM, LLM], folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    plain, adapted = tmp_path / "plain", tmp_path / "adapted"
    paused(pair[0], plain, 3, params=params)
    paused(pair[0], adapted, 3, params=params, adapter="own")
    llm = open_llm(folders[0], enable_lora=True)
    try:
        assert llm.load_session(adapted) is None, "no adapter has the name"
        llm.load_adapter("own", str(folders[2]))
        assert llm.load_session(adapted) is None, "its name stands for another one"
        content = plain.read_bytes()
        for damaged in (b"", content[:10], content[:200], content[:20] + b"?" + content[21:], b"x" + content):
            plain.write_bytes(damaged)
            assert llm.load_session(plain) is None
        plain.write_bytes(content[:-100])
        whole = ended(pair[1], pair[1].begin(PROMPT, params))
        resumed = llm.load_session(plain)
        assert resumed is not None and ended(llm, resumed) == whole, "the last page is cut, and computed"
    finally:
        llm.close()


def test_what_cannot_be_paused(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    llm, file = pair[0], tmp_path / "session"
    for params in (SamplingParams(n=2, max_tokens=5), SamplingParams(logprobs=1, max_tokens=5)):
        running = llm.begin(PROMPT, params)
        with pytest.raises(RequestError, match="one answer, without logprobs"):
            llm.save_session(running, file)
        llm.abort(running)
    running = llm.begin(PROMPT, SamplingParams(max_tokens=2))
    with pytest.raises(OSError, match="No such file"):
        llm.step()
        llm.save_session(running, tmp_path / "none" / "session")
    ended(llm, running)
    with pytest.raises(RequestError, match="has ended"):
        llm.save_session(running, file)


ODD: tuple[Any, ...] = (
    *(None, True, -1, 3, 2**31, 2**63, -(2**63), 1e308, float("nan"), "", "x" * 300, b"", b"zz", b"\xff" * 8, [], {}),
    *([[]], [None], [-1], [2**40], ["x"], ["x", 3], ["json_schema", b"{"], ["", "", False, -1, "", -1], {"a": []}),
)
"""Values that no session of ours has at some field."""


def parts_of(file: Path) -> tuple[dict[str, Any], list[Any], bytes]:
    """Return a session's fields, the row of its ``Submit``, and what follows its head."""
    found = read_head(file)
    assert found is not None
    head, offset = found
    length = int.from_bytes(head[:4], "little")
    [row] = msgpack.unpackb(head[4 + length :])
    return json.loads(head[4 : 4 + length]), row, file.read_bytes()[offset:]


def session_file(fields: Any, row: list[Any], blocks: bytes) -> bytes:
    text = json.dumps(fields).encode()
    return pack_head(len(text).to_bytes(4, "little") + text + msgpack.packb([row])) + blocks


COUNTS = [pytest.param(40, marks=pytest.mark.sample), pytest.param(repeats(1200), marks=pytest.mark.heavy)]


@pytest.mark.parametrize("count", COUNTS)
def test_files_that_are_almost_right_start_nothing_wrong(pair: tuple[LLM, LLM], tmp_path: Path, count: int) -> None:
    """Heads whose checksums are right and whose fields are not: no session, a named error, or a request that ends."""
    here, there = pair
    file, rng = tmp_path / "session", random.Random(49)
    options: dict[str, Any] = {"params": SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)}
    whole = ended(here, here.begin(PROMPT, **options))
    paused(here, file, 3, stop=["zq", "qz"], **options)
    fields, row, blocks = parts_of(file)
    names = [name for name in fields if name not in ("base", "adapter_digest", "version")]
    for number in range(count):
        odd, changed = dict(fields), [*row]
        if number % 2:
            odd[rng.choice(names)] = rng.choice([value for value in ODD if "b'" not in repr(value)])
        else:
            at = rng.randrange(1, len(row))
            if isinstance(row[at], list) and row[at] and rng.random() < 0.7:
                changed[at] = [*row[at]]
                changed[at][rng.randrange(len(row[at]))] = rng.choice(ODD)
            else:
                changed[at] = rng.choice(ODD)
        file.write_bytes(session_file(odd, changed, blocks))
        try:
            if (running := there.load_session(file)) is not None:
                ended(there, running)
        except EngineError:
            pass
        core_of(there).check()
    assert ended(there, there.begin(PROMPT, **options)) == whole
    for damaged in (b"", b"\x00" * 3, b"\xff" * 9, (2).to_bytes(4, "little") + b"[]", b"\x90" * 100, b"[" * 100_000):
        file.write_bytes(pack_head(damaged) + blocks)
        assert there.load_session(file) is None


def test_tokens_beyond_the_vocabulary_are_refused_by_name(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    here, there = pair
    file = tmp_path / "session"
    paused(here, file, 3, params=SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    fields, row, blocks = parts_of(file)
    generated = next(at for at in range(len(row) - 1, 1, -1) if isinstance(row[at], bytes))
    assert len(array("i", row[generated])) >= 3
    for token in (-1, 1 << 30):
        changed = [*row]
        changed[generated] = array("i", [5, token, 5]).tobytes()
        file.write_bytes(session_file(fields, changed, blocks))
        with pytest.raises(RequestError, match="generated must be a token id from 0"):
            there.load_session(file)


def test_kv_of_no_numbers_stops_nothing(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    """A file says what its KV is. Where that is not a number, its own request ends, and others go on."""
    here, there = pair
    file = tmp_path / "session"
    options: dict[str, Any] = {"params": SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)}
    other = [*PROMPT[::-1]]
    whole = ended(here, here.begin(other, **options))
    paused(here, file, 3, **options)
    fields, row, blocks = parts_of(file)
    made = b""
    while blocks:
        size = block_size(blocks[:PREAMBLE_BYTES])
        block, blocks = blocks[:size], blocks[size:]
        header_bytes, payload_bytes = check_preamble(memoryview(block), sealed=False)
        start = PREAMBLE_BYTES + header_bytes
        assert len(block) == start + payload_bytes + SEAL_BYTES
        body = block[:start] + b"\xff" * payload_bytes
        made += body + block_checksum(body)
    file.write_bytes(session_file(fields, row, made))
    there.reset_prefix_cache()
    running = there.load_session(file)
    beside = there.begin(other, **options)
    assert running is not None
    while not (running.is_done and beside.is_done):
        there.step()
    [answer] = beside.output().outputs
    assert (list(answer.token_ids), answer.text, answer.finish_reason) == whole
    core_of(there).check()
    there.reset_prefix_cache()


def test_a_prefetch_reads_what_an_earlier_engine_has_written(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        llm = open_llm(folders[0], kv_disk=str(tmp_path))
        found += llm.prefetch({"prompt_token_ids": PROMPT})
        found += llm.prefetch({"prompt_token_ids": PROMPT})
        llm.close()
    whole = len(PROMPT) // 16 * 16
    assert found[0] == 0 and found[2] == whole and min(found[1], found[3]) >= whole
