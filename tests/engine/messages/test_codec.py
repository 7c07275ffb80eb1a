from __future__ import annotations

import dataclasses
from array import array
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine import messages
from rootgraft.engine.messages import (
    Abort,
    AdapterChanged,
    Adapters,
    CachedPrefixes,
    Done,
    Failed,
    Heartbeat,
    ListAdapters,
    ListPrefixes,
    LoadAdapter,
    Message,
    PrepareGrammar,
    Ready,
    Reply,
    Shutdown,
    SnapshotTaken,
    Submit,
    TakeSnapshot,
    TokenOut,
    TokenTexts,
    UnloadAdapter,
    decode,
    encode,
)
from rootgraft.engine.snapshot import EngineSnapshot, NamespaceView, NodeView, SequenceView, SlotView
from rootgraft.engine.types import AdapterInfo, FinishReason, KvPrefix, Logprob, SamplingParams, Usage
from rootgraft.radix.namespace import Namespace, Path

ints = st.integers(0, 2**31 - 1)
floats = st.floats(allow_nan=False)
logprobs = st.builds(Logprob, ints, floats, ints, st.lists(st.tuples(ints, floats), max_size=3).map(tuple))
usages = st.builds(Usage, ints, ints, ints)
params = st.builds(
    SamplingParams,
    max_tokens=ints,
    temperature=floats,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.lists(ints, max_size=3).map(tuple),
    logit_bias=st.lists(st.tuples(ints, floats), max_size=3).map(tuple),
    logprob_token_ids=st.lists(ints, max_size=3).map(tuple),
    allowed_token_ids=st.lists(ints, max_size=3).map(tuple),
    bad_words=st.lists(st.lists(ints, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)
tokens = st.lists(ints, max_size=9)
arrays = tokens.map(lambda t: array("i", t))
grammars = st.none() | st.tuples(st.text(), st.binary())
infos = st.builds(AdapterInfo, st.text(), st.text(), ints, ints, st.booleans(), st.text(), ints, ints, ints)
failures = st.builds(Failed, st.integers(-1, 9), st.text(), st.text(), st.none() | st.text(), st.none())
names = st.none() | st.text()
views = (
    st.builds(NamespaceView, names, st.text(), st.booleans()),
    st.builds(NodeView, *[st.integers(-1, 2**40)] * 7, st.booleans()),
    st.builds(SequenceView, *[st.integers(-2, 2**40)] * 10, names, st.text(), st.booleans(), floats, ints),
    infos,
    st.builds(SlotView, names, st.booleans(), ints, st.booleans()),
)
namespaces, nodes, sequences, adapters, slots = (st.lists(view, max_size=2).map(tuple) for view in views)
numbers = st.dictionaries(st.text(), floats)
snapshots = st.builds(EngineSnapshot, ints, numbers, namespaces, nodes, ints, sequences, adapters, slots)
spaces = st.builds(Namespace, st.text(), st.none() | st.text(), st.text(), st.text())
paths = st.builds(Path, spaces) | st.just(Path(Namespace("base", "digest"), 3, Namespace("base")))
prefixes = st.builds(KvPrefix, paths, arrays, ints, st.none() | st.text())
any_message = st.one_of(
    st.builds(TokenTexts, arrays, st.binary(), tokens.map(tuple)),
    st.builds(Submit, ints, arrays, params, st.none() | st.text(), st.text(), grammars),
    st.builds(PrepareGrammar, st.text(), st.binary()),
    st.builds(Abort, tokens.map(tuple)),
    st.just(Shutdown()),
    st.builds(LoadAdapter, ints, st.text(), st.text(), st.booleans()),
    st.builds(UnloadAdapter, ints, st.text()),
    st.builds(ListAdapters, ints),
    st.builds(TakeSnapshot, ints),
    st.builds(SnapshotTaken, ints, snapshots),
    st.builds(
        Ready,
        ints,
        ints,
        ints,
        ints,
        st.lists(st.text(), max_size=2).map(tuple),
        st.lists(infos, max_size=2).map(tuple),
    ),
    st.builds(ListPrefixes, ints, st.booleans()),
    st.builds(CachedPrefixes, ints, st.lists(prefixes, max_size=2).map(tuple)),
    st.builds(AdapterChanged, st.text(), st.none() | infos),
    st.builds(Reply, ints, st.none() | failures),
    st.builds(Adapters, ints, st.lists(infos, max_size=2).map(tuple)),
    st.builds(TokenOut, ints, tokens.map(tuple), st.lists(logprobs, max_size=2).map(tuple)),
    st.builds(Done, ints, st.sampled_from(FinishReason), usages, st.none() | ints),
    failures,
    st.builds(Heartbeat, st.dictionaries(st.text(), floats), st.dictionaries(st.text(), st.lists(floats))),
)


@given(st.lists(any_message, max_size=5))
def test_a_frame_gives_back_what_went_in(sent):
    received = decode(encode(sent))
    assert received == sent
    assert [type(m) for m in received] == [type(m) for m in sent]


def test_every_message_is_covered():
    assert set(get_args(Message)) == {c for c in vars(messages).values() if dataclasses.is_dataclass(c)}


@pytest.mark.parametrize("frame", [b"", b"\x93", b"\x91\x91\x63", b"\x91\x92\x00\x01", b"\xc1"])
def test_anything_else_is_refused(frame):
    with pytest.raises(ValueError):
        decode(frame)
