"""Adapters in the control plane: real names, versions and slots over a device of integers."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter

import pytest
from support.engine.adapter_engine import Engine, write
from support.engine.core_hooks import tree_of
from support.engine.fake_worker import FakeWorker, adapter_code
from support.models.bad_adapters import CASES
from support.models.lora_folders import write_folder

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.messages import (
    Abort,
    Failed,
    ListAdapters,
    LoadAdapter,
    UnloadAdapter,
)
from rootgraft.engine.text.adapter_vocabulary import digest_tokenizer_files, tokenizer_identity
from rootgraft.engine.types import FinishReason

LINKS = {number for number, name in enumerate(CASES) if "link" in name}  # these need a folder that they lead out of


@pytest.fixture
def made():
    engines: list[Engine] = []

    def make(*args, **options) -> Engine:
        engines.append(Engine(*args, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.gate.set()
        engine.core.close()


def test_base_and_adapters_share_a_batch_and_no_kv(made, tmp_path):
    engine = made()
    for i in range(2):
        engine.load(f"a{i}", write(tmp_path, f"a{i}", i))
    prompt = list(range(10))
    numbers = [engine.submit(prompt, adapter, max_tokens=6) for adapter in (None, "a0", "a1", "a0")]
    engine.run()
    for number in numbers:
        engine.check_tokens(number)
    assert engine.tokens[0] != engine.tokens[1] != engine.tokens[2]
    assert [engine.ends[number].usage.cached for number in numbers] == [0, 0, 0, 8]
    assert len({len(batch.rows) for batch in engine.worker.batches}) > 1


def test_a_salt_that_equals_a_digest_is_not_the_adapter(made, tmp_path):
    engine = made()
    engine.load("a", write(tmp_path, "a", 1))
    digest = engine.pool.registry.get("a").digest
    engine.submit(range(9), "a", max_tokens=2)
    engine.run()
    number = engine.submit(range(9), None, salt=digest, max_tokens=2)
    other = engine.submit(range(9), "a", salt="tenant", max_tokens=2)
    engine.run()
    assert engine.ends[number].usage.cached == engine.ends[other].usage.cached == 0
    engine.check_tokens(number)
    engine.check_tokens(other)


def test_kv_is_shared_within_a_tenant_and_a_salt_alone(made, tmp_path):
    """Of a LoRA, of an activated one, whose part before the invocation is the base model's, and of the base model."""
    engine = made(num_pages=400)
    engine.load("plain", write(tmp_path, "plain", 1))
    engine.load("activated", write(tmp_path, "activated", 2, [7, 8]))

    def cached(salt: str, tenant: str) -> list[int]:
        found = []
        for adapter in ("plain", "activated", None):
            number = engine.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], adapter, salt, tenant, max_tokens=2)
            engine.codes[number] = engine.codes[number][0], 6 if adapter == "activated" else 0
            engine.run()
            engine.check_tokens(number)
            found.append(engine.ends[number].usage.cached)
        return found

    scopes = [(salt, tenant) for salt in ("", "a", "b") for tenant in ("", "a", "b")]
    assert [cached(*scope) for scope in scopes] == [[0, 0, 6]] * len(scopes)
    assert [cached(*scope) for scope in scopes] == [[8, 8, 8]] * len(scopes)


def test_an_invocation_in_a_label_does_not_activate(made, tmp_path):
    """The tokens of a label are read with the activation that the prompt before them has, or with none."""
    engine = made()
    engine.load("activated", write(tmp_path, "activated", 2, [7, 8]))
    invoked = engine.submit([1, 2, 7, 8, 3, 7, 8, 4], "activated", max_tokens=2, num_label=3)
    split = engine.submit([1, 2, 3, 7, 8, 4], "activated", max_tokens=2, num_label=2)
    engine.codes[invoked] = engine.codes[invoked][0], 2
    engine.codes[split] = 0, 0
    engine.run()
    engine.check_tokens(invoked)
    engine.check_tokens(split)


def test_new_bytes_under_an_old_name(made, tmp_path):
    """Running sequences end on their version, later ones begin on the new one, and the old KV goes in the end."""
    engine = made(num_pages=2000)
    engine.load("a", write(tmp_path, "v1", 1))
    old = engine.submit(range(9), "a", max_tokens=5000)
    engine.wait(lambda: len(engine.tokens[old]) > 3)
    engine.load("a", write(tmp_path, "v2", 2), True)
    new = engine.submit(range(9), "a", max_tokens=5)
    engine.wait(lambda: new in engine.ends)
    assert old not in engine.ends
    engine.core.handle([Abort((old,))])
    engine.run()
    engine.check_tokens(old)
    engine.check_tokens(new)
    assert engine.codes[old] != engine.codes[new]
    assert engine.ends[new].usage.cached == 0
    namespaces = tree_of(engine.core).tops
    assert {namespace.adapter for namespace in namespaces} == {engine.pool.registry.get("a").digest}


def test_tokens_of_another_tokenizer_are_refused(made, tmp_path):
    """Those made just before the name came to stand for another version, and those that waited for its first load."""
    engine = made(tmp_path)
    for name, definition in (("old", "{}"), ("new", "{ }")):
        write(tmp_path, name, 1)
        (tmp_path / name / "tokenizer.json").write_text(definition)
    size = engine.worker.vocab_size
    old, new = (
        tokenizer_identity(digest_tokenizer_files(tmp_path / name, None), size, size) for name in ("old", "new")
    )
    write(tmp_path, "plain", 1)
    engine.load("a", "old")
    running = engine.submit([1, 2], "a", tokenizer=old, max_tokens=5)
    engine.step()
    engine.load("a", "new", replace=True)
    late, base = (engine.submit([1, 2], "a", tokenizer=each, max_tokens=2) for each in (old, ""))
    right = engine.submit([1, 2], "a", tokenizer=new, max_tokens=2)
    engine.run()
    for number in (late, base):
        assert engine.ends[number].kind == "AdapterUnavailable" and not engine.tokens[number]
        assert "The tokenizer of the adapter" in engine.ends[number].message
    for number, count in ((running, 5), (right, 2)):
        engine.check_tokens(number)
        assert len(engine.tokens[number]) == count
    engine.load("a", "plain", replace=True)
    found = [engine.submit([1, 2], name, tokenizer=each, max_tokens=2) for name, each in
             (("a", new), ("a", ""), ("old", ""), ("old", old), ("plain", ""), ("plain", old))]  # fmt: skip
    engine.run()
    assert [isinstance(engine.ends[number], Failed) for number in found] == [True, False, True, False, False, True]


def test_unloading_drains_and_drops_the_kv_of_every_salt(made, tmp_path):
    engine = made()
    engine.load("a", write(tmp_path, "a", 1))
    for salt in ("", "x", "y"):
        engine.submit(range(9), "a", salt=salt, max_tokens=2)
    engine.run()
    engine.submit(range(9), None, max_tokens=2)
    last = engine.submit(range(9), "a", max_tokens=30)
    engine.wait(lambda: engine.tokens[last])
    assert engine.call(UnloadAdapter, "a").failure is None
    assert engine.names == {} and last not in engine.ends
    late = engine.submit(range(9), "a", max_tokens=2)
    engine.run()
    engine.check_tokens(last)
    assert engine.ends[late].kind == "UnknownModel"
    assert {namespace.adapter for namespace in tree_of(engine.core).tops} == {None}
    assert engine.pool.slots.num_resident == 0 and len(engine.pool.cache) == 0


def test_an_activated_adapter_reads_the_base_models_kv_and_back(made, tmp_path):
    engine = made()
    engine.load("a", write(tmp_path, "a", 1, invocation=[7, 8]))
    engine.load("b", write(tmp_path, "b", 2, invocation=[7, 8]))
    context = [1, 2, 3, 4, 5, 6] * 3
    engine.submit([*context, 9], None, max_tokens=1)
    engine.run()
    for name in ("a", "b"):
        number = engine.submit([*context, 7, 8, 3], name, max_tokens=6)
        code = engine.codes[number][0]
        engine.codes[number] = code, len(context)
        engine.run()
        engine.check_tokens(number)
        assert engine.ends[number].usage.cached == len(context)
    back = engine.submit([*context, 7, 8, 3], None, max_tokens=6)
    engine.run()
    engine.check_tokens(back)
    assert engine.ends[back].usage.cached == len(context)


def test_an_activated_adapter_without_its_tokens_is_the_base_model(made, tmp_path):
    engine = made()
    engine.load("a", write(tmp_path, "a", 1, invocation=[7, 8]))
    number = engine.submit(range(5), "a", max_tokens=6)
    engine.codes[number] = 0, 0
    engine.run()
    engine.check_tokens(number)
    assert all(start.slot == -1 for batch in engine.worker.batches for start in batch.starts)


def test_who_waits_for_a_slot_waits_alone(made, tmp_path):
    engine = made(slots=1, max_cpu_bytes=1)
    for i in range(3):
        engine.load(f"a{i}", write(tmp_path, f"a{i}", i))
    engine.gate.clear()
    stuck = [engine.submit([i % 11, 1, 2], f"a{i % 2}", max_tokens=3) for i in range(20)]
    free = engine.submit(range(9), None, max_tokens=8)
    engine.wait(lambda: free in engine.ends)
    assert not any(number in engine.ends for number in stuck)
    engine.gate.set()
    engine.run()
    for number in (*stuck, free):
        engine.check_tokens(number)


def test_a_stream_of_one_adapter_does_not_starve_another(made, tmp_path):
    engine = made(slots=1)
    for name, seed in (("busy", 1), ("rare", 2)):
        engine.load(name, write(tmp_path, name, seed))
    engine.submit([1], "busy", max_tokens=10)
    engine.step()
    rare = engine.submit([2], "rare", max_tokens=2)
    for i in range(60):
        if rare in engine.ends:
            break
        engine.submit([3, i % 7], "busy", max_tokens=10)
        for _ in range(3):
            engine.step()
    assert rare in engine.ends and i < 20
    engine.run()


def test_preempted_sequences_keep_their_version(made, tmp_path):
    engine = made(num_pages=12)
    for i in range(2):
        engine.load(f"a{i}", write(tmp_path, f"a{i}", i))
    numbers = [engine.submit([i, 1, 2, 3], f"a{i % 2}", max_tokens=25) for i in range(4)]
    engine.run()
    assert engine.core.stats()["preemptions"] > 0
    for number in numbers:
        engine.check_tokens(number)


def test_a_folder_below_the_folder_of_adapters_is_loaded_when_it_is_named(made, tmp_path):
    write(tmp_path, "team/one", 1)
    write_folder(tmp_path / "bad", data=b"no tensors at all")
    engine = made(tmp_path)
    waits = [engine.submit(range(5), "team/one", max_tokens=3) for _ in range(3)]
    bad = engine.submit(range(5), "bad", max_tokens=3)
    unknown = [engine.submit(range(5), name, max_tokens=3) for name in ("none", "../x", "team/../team/one", "")]
    aborted = engine.submit(range(5), "team/one", max_tokens=3)
    engine.core.handle([Abort((aborted,))])
    engine.run()
    code = adapter_code(engine.pool.registry.get("team/one").digest)
    for number in waits:
        engine.codes[number] = code, 0
        engine.check_tokens(number)
        assert len(engine.tokens[number]) == 3
    assert (engine.ends[bad].kind, engine.ends[bad].param) == ("RequestError", "model")
    assert {engine.ends[number].kind for number in unknown} == {"UnknownModel"}
    assert engine.ends[aborted].reason is FinishReason.ABORT
    assert engine.names.keys() == {"team/one"}


def test_a_name_that_was_unloaded_while_it_loads_can_be_loaded_again_at_once(made, tmp_path):
    """Who waited for the load that was discarded is told so, who comes later gets the new one."""
    write(tmp_path, "v1", 1)
    write(tmp_path, "v2", 2)
    engine = made(tmp_path)
    engine.gate.clear()
    engine.core.handle([LoadAdapter(501, "a", "v1")])
    early = engine.submit(range(9), "a", max_tokens=3)
    engine.core.handle([UnloadAdapter(502, "a")])
    gone = engine.submit(range(9), "a", max_tokens=3)
    assert [each.state for each in engine.call(ListAdapters).adapters] == []
    engine.core.handle([LoadAdapter(503, "a", "v2")])
    late = engine.submit(range(9), "a", max_tokens=3)
    assert [each.path for each in engine.call(ListAdapters).adapters] == ["v2"]
    engine.step()
    engine.gate.set()
    engine.run()
    assert engine.replies[502].failure is None and engine.replies[503].failure is None
    assert "was unloaded while" in engine.replies[501].failure.message
    assert "was unloaded while" in engine.ends[early].message
    assert engine.ends[gone].kind == "UnknownModel"
    engine.codes[late] = adapter_code(engine.pool.registry.get("a").digest), 0
    engine.check_tokens(late)
    assert len(engine.tokens[late]) == 3


def test_malformed_adapters_are_refused_and_touch_nobody(made, tmp_path):
    """The whole corpus, each beside a running stream: it is the sender's fault, stream and adapter are as before."""
    engine = made(num_pages=2000)
    engine.load("good", write(tmp_path, "good", 1))
    version = engine.pool.registry.get("good")
    streams = [engine.submit(range(9), "good", max_tokens=500)]
    root = tmp_path / "bad"
    root.mkdir()
    for number, (spoil, _) in enumerate(CASES.values()):
        if number not in LINKS:
            if streams[-1] in engine.ends:
                streams.append(engine.submit([number % 11, 1], "good", max_tokens=500))
            spoil(root / str(number))
            name = "good" if number % 2 else f"bad{number}"
            failure = engine.call(LoadAdapter, name, str(root / str(number)), True).failure
            assert failure.kind == "RequestError" and str(tmp_path) not in failure.message
    [info] = engine.call(ListAdapters).adapters
    assert (info.name, info.state) == ("good", "ready") and engine.pool.registry.get("good") is version
    engine.run()
    for stream in streams:
        engine.check_tokens(stream)
        assert len(engine.tokens[stream]) == 500
    assert engine.pool.slots.num_resident == 1 and len(engine.pool.cache) == 1


def test_a_thousand_registered_adapters_cost_a_step_what_eight_do(made, tmp_path):
    """The calls that a step makes are counted: they follow from what runs, not from what is registered."""
    counts = []
    off = '{"method": "off"}'  # of drafts, which go by the clock
    for registered in (8, 1000):
        engine = made(num_pages=400, max_adapters=1000, speculative_config=off)
        path = write(tmp_path, "a", 1)
        for number in range(registered):
            engine.core.handle([LoadAdapter(number, f"n{number}", path, False)])
        engine.wait(lambda engine=engine, registered=registered: len(engine.pool.registry) == registered)
        numbers = [engine.submit([1, 2, number], f"n{number}", max_tokens=100) for number in range(2)]
        engine.wait(lambda engine=engine, numbers=numbers: all(engine.tokens[number] for number in numbers))
        counts.append(calls_of(engine.core.step, 20))
    assert counts[0] == counts[1] > 0


def calls_of(function, times: int) -> int:
    """Python calls that these calls of a function make, but for those of collecting whatever garbage there is."""
    seen = Counter()
    gc.disable()
    sys.setprofile(lambda _frame, event, _argument: seen.update([event]))
    try:
        for _ in range(times):
            function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen["call"] + seen["c_call"]


def test_replies_and_the_list(made, tmp_path):
    engine = made()
    path = write(tmp_path, "a", 1)
    engine.load("a", path)
    assert engine.call(LoadAdapter, "a", path).failure.param == "name"
    assert engine.call(LoadAdapter, "b", str(tmp_path / "none")).failure.kind == "RequestError"
    assert engine.call(LoadAdapter, "no name", path).failure.param == "name"
    assert engine.call(UnloadAdapter, "b").failure.kind == "UnknownModel"
    engine.submit(range(5), "a", max_tokens=20)
    engine.wait(lambda: engine.tokens[0])
    [info] = engine.call(ListAdapters).adapters
    assert (info.name, info.path, info.rank, info.tier) == ("a", path, 2, "device")
    assert (info.state, info.pins, info.running, info.requests, info.hits) == ("ready", 1, 1, 1, 0)
    assert info.bytes > 0 and not info.activated
    engine.submit(range(5), "a", max_tokens=2)
    [info] = engine.call(ListAdapters).adapters
    assert (info.requests, info.hits) == (2, 1)
    engine.run()
    assert engine.core.stats()["adapters"] == 1


def test_a_limit_of_names_may_be_asked_again(made, tmp_path):
    engine = made(max_adapters=1)
    path = write(tmp_path, "a", 1)
    engine.load("a", path)
    failure = engine.call(LoadAdapter, "b", path).failure
    assert (failure.kind, failure.param) == ("AdapterUnavailable", None) and "--max-adapters" in failure.message
    assert engine.call(LoadAdapter, "a", path, True).failure is None


def test_versions_of_one_name_count_as_one(made, tmp_path):
    """As those of a fleet, which loads the new one beside the old: no free name is needed, and none is gained."""
    engine = made(max_adapters=2)
    path = write(tmp_path, "a", 1)
    engine.load("a", path)
    engine.load("b", path)
    for version in ("a@2", "a@3"):
        assert engine.call(LoadAdapter, version, path, False, False, 0, "a").failure is None
    engine.call(UnloadAdapter, "a")
    assert engine.call(LoadAdapter, "c", path).failure.kind == "AdapterUnavailable"
    assert engine.call(LoadAdapter, "a", path).failure is None
    for version in ("a", "a@2"):
        engine.call(UnloadAdapter, version)
    assert engine.call(LoadAdapter, "c", path).failure.kind == "AdapterUnavailable"
    engine.call(UnloadAdapter, "a@3")
    assert engine.call(LoadAdapter, "c", path).failure is None


def test_the_list_tells_what_loads_and_what_drains(made, tmp_path):
    """One name three times: what it stands for, what it stood for when a running sequence came, what is on its way."""
    engine = made(num_pages=2000)
    paths = [write(tmp_path, f"v{i}", i) for i in range(3)]
    engine.load("a", paths[0])
    engine.submit(range(9), "a", max_tokens=4000)
    engine.wait(lambda: engine.tokens[0])
    engine.load("a", paths[1], True)
    engine.gate.clear()
    engine.core.handle([LoadAdapter(1, "a", paths[2], True), LoadAdapter(2, "b", paths[0])])
    engine.step()
    infos = engine.call(ListAdapters).adapters
    assert [(info.name, info.path, info.state, info.tier, info.pins) for info in infos] == [
        ("a", paths[1], "ready", "host", 0),
        ("a", paths[0], "draining", "device", 1),
        ("a", paths[2], "loading", "disk", 0),
        ("b", paths[0], "loading", "disk", 0),
    ]
    assert [info.rank for info in infos] == [2, 2, 0, 0]
    engine.core.handle([Abort((0,))])
    engine.gate.set()
    engine.wait(lambda: {1, 2} <= engine.replies.keys())
    assert [(info.name, info.state) for info in engine.call(ListAdapters).adapters] == [("a", "ready"), ("b", "ready")]


def test_an_adapter_whose_files_are_gone_ends_its_sequences_and_no_others(made, tmp_path):
    engine = made(slots=1, max_cpu_bytes=1)
    for i in range(2):
        engine.load(f"a{i}", write(tmp_path, f"a{i}", i))
    running = engine.submit([1], "a1", max_tokens=60)
    engine.wait(lambda: engine.tokens[running])
    (tmp_path / "a0" / "adapter_model.safetensors").unlink()
    lost = engine.submit([1], "a0", max_tokens=3)
    engine.run()
    assert engine.ends[lost].kind == "RequestError" and engine.ends[lost].param == "model"
    engine.check_tokens(running)
    assert engine.names.keys() == {"a1"}


def test_the_operator_may_load_from_anywhere_and_a_request_may_not(made, tmp_path):
    """``--lora-modules`` lie outside the folder of adapters, and are read again from there; nothing else is."""
    root = tmp_path / "adapters"
    write(root, "inside", 1)
    outside = [write(tmp_path, name, seed) for name, seed in (("one", 2), ("two", 3))]
    engine = made(root, slots=1, max_cpu_bytes=1, lora_modules=(f"a={outside[0]}", "b=../two", "c=inside"))
    for path in (*outside, "../one"):
        failure = engine.call(LoadAdapter, "x", path, False).failure
        assert failure.param == "path" and str(tmp_path) not in failure.message
    for _ in range(2):
        numbers = [engine.submit(range(5), name, max_tokens=3) for name in ("a", "b", "c")]
        engine.run()
        for number in numbers:
            engine.check_tokens(number)


def test_adapters_of_the_start(made, tmp_path):
    engine = made(lora_modules=(f"a={write(tmp_path, 'a', 1)}", f"b={write(tmp_path, 'b', 2)}"))
    assert engine.names.keys() == {"a", "b"}
    with pytest.raises(ConfigError, match="lora-modules"):
        made(lora_modules=(f"a={tmp_path / 'none'}",))


def test_without_adapters_every_call_is_refused():
    core = EngineCore(EngineConfig(block_size=4), FakeWorker(64, 4))
    core.handle([LoadAdapter(1, "a", "b"), UnloadAdapter(2, "a"), ListAdapters(3)])
    assert [(m.id, m.failure.kind) for m in core.step()] == [
        (1, "RequestError"),
        (2, "RequestError"),
        (3, "RequestError"),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"lora_modules": ("a=b",)},
        {"max_loras": 3},
        {"lora_dir": "x"},
        {"enable_lora": True, "lora_modules": ("a",)},
        {"enable_lora": True, "lora_modules": ("a=b", "a=c")},
        {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3},
    ],
)
def test_options_that_contradict_each_other(options):
    with pytest.raises(ConfigError):
        EngineConfig(**options)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_every_sequence_ends_on_its_version(made, tmp_path, seed):
    """Loads, replacements, unloads, aborts, few pages, two slots, no room on the host: tokens stay right."""
    rng = random.Random(seed)
    engine = made(num_pages=24, max_cpu_bytes=1, max_num_seqs=3)
    paths = [write(tmp_path, f"p{i}", i, [7, 8] if i % 3 == 2 else None) for i in range(6)]
    number = 5000
    for _ in range(150):
        match rng.randrange(6):
            case 0:
                number += 1
                engine.core.handle([LoadAdapter(number, f"n{rng.randrange(4)}", rng.choice(paths), True)])
            case 1:
                number += 1
                if rng.random() < 0.3:
                    engine.core.handle([UnloadAdapter(number, f"n{rng.randrange(4)}")])
            case 2 if engine.prompts:
                if rng.random() < 0.3:
                    engine.core.handle([Abort((rng.randrange(len(engine.prompts)),))])
            case 3 | 4:
                name = rng.choice([None, "n0", "n1", "n2", "n3"])
                prompt = [rng.randrange(3) for _ in range(rng.randint(1, 12))] + rng.choice([[], [7, 8, 1]])
                loaded = name is None or engine.pool.registry.get(name)
                if loaded:
                    sequence = engine.submit(prompt, name, max_tokens=rng.randint(1, 12))
                    if loaded and loaded is not True and loaded.invocation_tokens:
                        code = engine.codes[sequence][0] if 7 in prompt else 0
                        engine.codes[sequence] = code, prompt.index(7) if 7 in prompt else 0
            case _:
                for _ in range(rng.randint(1, 6)):
                    engine.step()
    engine.run()
    for sequence in engine.prompts:
        engine.check_tokens(sequence)
