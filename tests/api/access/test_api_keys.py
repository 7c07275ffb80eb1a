"""Keys: the file and its mistakes, reload, scopes over the whole route table, adapters, tenants and their cache."""

from __future__ import annotations

import codecs
import hashlib
import logging
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.api.api_live import Live, make_state, serve
from support.api.key_files import entry, sha, write
from support.engine.fake_worker import FakeWorker

from rootgraft.api.access import api_keys
from rootgraft.api.access.api_keys import ANYBODY, Key, KeyRing, Scope, needed_scope, read_keys
from rootgraft.api.config import ServerConfig
from rootgraft.api.error_responses import speaks_anthropic
from rootgraft.api.http.guard import OPEN_PATHS
from rootgraft.api.observe.live_page import PATHS
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.messages import Done, Submit, TokenOut
from rootgraft.engine.types import AdapterInfo, Priority, SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Start = Callable[[ServerConfig], Live]


TOML = f"""
[[keys]]
name = "team-a"
sha256 = "{sha("first")}"
scopes = ["inference", "metrics"]
adapters = ["sql"]
requests_per_minute = 60
tokens_per_minute = 1000
priority = "batch"

[[keys]]
name = "spare"
tenant = "team-a"
sha256 = "{sha("second")}"
"""


def test_a_file_in_either_format(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(TOML)
    first, second = read_keys(tmp_path / "keys.toml")
    assert first == Key(
        name="team-a",
        digest=hashlib.sha256(b"first").digest(),
        tenant="team-a",
        scopes=frozenset({Scope.INFERENCE, Scope.METRICS}),
        adapters=frozenset({"sql"}),
        requests_per_minute=60,
        tokens_per_minute=1000,
        priority=Priority.BATCH,
        earliest=Priority.BATCH,
    )
    assert (second.tenant, second.scopes, second.adapters) == ("team-a", {Scope.INFERENCE}, None)
    assert (second.priority, second.requests_per_minute) == (Priority.INTERACTIVE, None)
    write(tmp_path / "keys.json", entry("a"))
    assert [key.name for key in read_keys(tmp_path / "keys.json")] == ["a"]
    for name in ("keys.toml", "keys.json"):
        path = tmp_path / name
        before = read_keys(path)
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
        assert read_keys(path) == before


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], "keys"),
        (None, "keys"),
        ({}, "keys"),
        ([{"name": "a"}], r"keys\[0\]\.sha256"),
        ([entry("a"), {"name": "b", "sha256": "secret"}], r"keys\[1\]\.sha256.*64 hexadecimal"),
        ([{**entry("a"), "sha256": sha("a").upper()}], "lower case"),
        ([entry("")], r"keys\[0\]\.name"),
        ([entry("a b")], r"keys\[0\]\.name"),
        ([entry("a" * 65)], r"keys\[0\]\.name"),
        ([entry("a", key="secret")], r"keys\[0\]\.key"),
        ([entry("a", scopes=[])], r"keys\[0\]\.scopes"),
        ([entry("a", scopes=["root"])], r"keys\[0\]\.scopes\[0\]"),
        ([entry("a", scopes="admin")], r"keys\[0\]\.scopes"),
        ([entry("a", adapters=["x", 5])], r"keys\[0\]\.adapters\[1\]"),
        ([entry("a", requests_per_minute=0)], "requests_per_minute"),
        ([entry("a", requests_per_minute=True)], "requests_per_minute"),
        ([entry("a", tokens_per_minute=1.5)], "tokens_per_minute"),
        ([entry("a", tokens_per_minute="5")], "tokens_per_minute"),
        ([entry("a", priority="urgent")], "priority"),
        ([entry("a", priority=0)], "priority"),
        ([entry("a"), entry("a")], "same name"),
        ([entry("a"), {**entry("b"), "sha256": sha("a")}], "same sha256"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_its_entry(tmp_path: Path, keys: Any, message: str) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(orjson.dumps({"keys": keys}))
    with pytest.raises(ConfigError, match=message) as caught:
        read_keys(file)
    assert "secret" not in str(caught.value) and str(tmp_path) not in str(caught.value)


def test_what_is_no_file_of_keys(tmp_path: Path) -> None:
    for name, content in (("a.json", b"{"), ("a.toml", b"= 5"), ("a.json", b"\xff"), ("a.txt", b"key"), ("a", b"key")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match="--api-key-file"):
            read_keys(tmp_path / name)
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file or directory\. Try: rootgraft key"):
        read_keys(tmp_path / "none.json")
    (tmp_path / "a.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"a\.toml cannot be read: it is not UTF-8 text\.$"):
        read_keys(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        make_state(ServerConfig(api_key_file=str(tmp_path / "none.json")))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += api_keys.LOOK_SECONDS
        return self.now


def test_the_ring_follows_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.json"
    write(file, entry("a"), entry("b"))
    ring = KeyRing(("given",), file, Clock())

    def valid() -> str:
        return "".join(name for name in "abc" if ring.find(name.encode()))

    assert valid() == "ab" and len(ring) == 3
    write(file, entry("b"), entry("c"))
    assert valid() == "bc"
    with caplog.at_level(logging.ERROR, logger="rootgraft.api.access.api_keys"):
        for broken in (b"{", b'{"keys": []}', b'{"keys": [{"name": "secret"}]}'):
            file.write_bytes(broken)
            assert valid() == "bc"
        file.unlink()
        assert valid() == "bc"
    assert len(caplog.records) == 4 and "secret" not in caplog.text
    write(file, entry("a"))
    assert valid() == "a"
    found = ring.find(b"given")
    assert found is not None and found.name == f"key-{sha('given')[:12]}" and found.scopes == frozenset(Scope)


def test_without_keys_anybody_may_do_all() -> None:
    ring = KeyRing((), None)
    assert ring.find(b"") is ANYBODY and ring.find(b"anything") is ANYBODY and not len(ring)


def test_every_key_is_compared_whatever_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a look-up takes may depend on nothing but the number of keys: what it does is counted instead."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    keys = [f"key {number}" for number in range(50)]
    ring = KeyRing(keys, None)
    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    for token in (b"key 0", b"key 49", b"key", b"", b"key 00", b"x" * 10_000):
        compared.clear()
        ring.find(token)
        assert compared == [(hashlib.sha256(key.encode()).digest(), hashlib.sha256(token).digest()) for key in keys]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with one key for each scope, and some that are bound otherwise."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    write(
        file,
        *(entry(str(scope), scopes=[scope]) for scope in Scope),
        entry("narrow", adapters=["sql"]),
        entry("late", priority="batch"),
        entry("spare", tenant="inference"),
    )
    yield from serve(make_state(ServerConfig(api_key_file=str(file))))


def with_key(live: Live, name: str) -> Any:
    return live.http(headers={"authorization": f"Bearer {name}"})


def routes(live: Live) -> list[tuple[str, str]]:
    """Every method and path of the application, those outside of the OpenAPI document included."""
    with with_key(live, "inference") as http:
        document = http.get("/openapi.json").json()
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    found |= {("GET", path) for path in PATHS}
    return sorted({*found, ("GET", "/ping"), ("GET", "/openapi.json"), ("GET", "/nope"), ("POST", "/v1/nope")})


def test_every_route_is_guarded(guarded: Live) -> None:
    table = routes(guarded)
    assert len(table) >= 15
    for method, path in table:
        path = path.replace("{name}", "tiny")
        is_open = path in OPEN_PATHS and method == "GET"
        with guarded.http(follow_redirects=True) as http:
            assert (http.request(method, path).status_code == 200) == is_open, path
        for scope in Scope:
            with with_key(guarded, scope) as http:
                reply = http.request(method, path)
            allowed = is_open or needed_scope(path) is scope
            assert (reply.status_code == 403) != allowed, (path, scope)
            if not allowed:
                name = "permission_error" if speaks_anthropic(path) else "insufficient_scope"
                body = reply.json()
                told = [body["code"]] if isinstance(body["error"], str) else body["error"].values()
                assert name in told and scope is not needed_scope(path)


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("/metrics", Scope.METRICS),
        ("/v1/chat/completions", Scope.INFERENCE),
        ("/v1/models", Scope.INFERENCE),
        ("/v1/load_lora_adapter", Scope.ADMIN),
        ("/v1/adapters", Scope.ADMIN),
        ("/v1/adapters/sql", Scope.ADMIN),
        ("/v1/admin/models", Scope.ADMIN),
        ("/v1/fleet", Scope.ADMIN),
        ("/v1/cache", Scope.ADMIN),
        ("/v1/cache/reset", Scope.ADMIN),
        ("/v1/cache/sessions/export", Scope.ADMIN),
        ("/v1/cache/sessions/import", Scope.ADMIN),
        ("/v1/sessions/release", Scope.INFERENCE),
        ("/ui/state", Scope.ADMIN),
        ("/none/of/ours", Scope.INFERENCE),
    ],
)
def test_what_a_path_needs(path: str, scope: Scope) -> None:
    assert needed_scope(path) is scope


def test_what_changes_adapters_or_shows_all_tenants_is_for_admins(guarded: Live) -> None:
    for _, path in routes(guarded):
        of_adapters = "adapter" in path and not path.startswith("/ui/")
        named = of_adapters or "/admin/" in path or "/cache" in path or path in ("/ui/state", "/v1/fleet")
        named |= path.startswith("/v2/repository/models/")
        assert (needed_scope(path) is Scope.ADMIN) == named, path
    assert needed_scope("/v1/adapters/sql") is Scope.ADMIN


def test_a_key_sees_and_uses_its_adapters_alone(guarded: Live) -> None:
    guarded.reset()
    guarded.client.adapters = {
        name: AdapterInfo(name, name, 1, 1, False, "device", 0, 0, 0) for name in ("sql", "other")
    }
    for key, seen in (("inference", ["sql", "other"]), ("narrow", ["sql"])):
        with with_key(guarded, key) as http:
            models = [card["id"] for card in http.get("/v1/models").json()["data"]]
            assert models == ["tiny", "org/alias", *seen]
            for name in ("tiny", "sql", "other"):
                status = 200 if name in models else 404
                assert http.get(f"/v1/models/{name}").status_code == status
                assert http.post(COMPLETIONS, json={"model": name, "prompt": "x"}).status_code == status
                assert http.post("/tokenize", json={"model": name, "prompt": "x"}).status_code == status
                unknown = http.post(COMPLETIONS, json={"model": "none", "prompt": "x"}).text
                if status == 404:  # It cannot be told from one that does not exist.
                    assert http.post(COMPLETIONS, json={"model": name, "prompt": "x"}).text == unknown.replace(
                        "none", name
                    )


def test_tenants_reach_the_engine(guarded: Live, serve_with: Start) -> None:
    shared = serve_with(ServerConfig(api_key=("first", "second"), share_cache_between_keys=True))
    open_to_all = serve_with(ServerConfig())
    for live, keys in ((guarded, ("inference", "narrow", "spare")), (shared, ("first", "second")), (open_to_all, "x")):
        live.reset()
        for key in keys:
            with with_key(live, key) as http:
                http.post(COMPLETIONS, json={"prompt": "x", "cache_salt": "narrow"})
                http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]})

    def seen(live: Live) -> list[tuple[str, str, str]]:
        return [(one.tenant, one.cache_tenant, one.salt) for one in live.async_engine.seen]

    own = [("inference", "inference"), ("narrow", "narrow"), ("inference", "inference")]
    assert seen(guarded) == [(*who, salt) for who in own for salt in ("narrow", "")]
    names = [f"key-{sha(key)[:12]}" for key in ("first", "second")]
    assert seen(shared) == [(name, "", salt) for name in names for salt in ("narrow", "")]
    assert seen(open_to_all) == [("", "", "narrow"), ("", "", "")]


def test_bands_by_key_and_by_field(guarded: Live) -> None:
    guarded.reset()
    cases = [("inference", None, 1), ("inference", "batch", 2), ("late", None, 2), ("late", "batch", 2)]
    for key, asked, band in cases:
        with with_key(guarded, key) as http:
            reply = http.post(COMPLETIONS, json={"prompt": "x", "priority": asked})
            assert reply.status_code == 200 and guarded.async_engine.seen[-1].priority == band
    for key, asked in (("inference", "realtime"), ("late", "interactive"), ("late", "realtime")):
        with with_key(guarded, key) as http:
            reply = http.post(COMPLETIONS, json={"prompt": "x", "priority": asked})
            assert reply.status_code == 403 and reply.json()["error"]["code"] == "priority_not_allowed"


def test_anybody_may_ask_for_any_band(live: Live) -> None:
    with live.http() as http:
        for asked, band in (("realtime", 0), ("interactive", 1), ("batch", 2), (None, 1)):
            assert http.post(COMPLETIONS, json={"prompt": "x", "priority": asked}).status_code == 200
            assert live.async_engine.seen[-1].priority == band


def run_alone(core: EngineCore, number: int, prompt: list[int], tenant: str, cache_tenant: str, salt: str) -> Any:
    """One sequence on an idle engine: its tokens, its cached tokens, and the counters that it moved."""
    before = core.stats()
    params = SamplingParams(max_tokens=4)
    core.handle([Submit(number, array("i", prompt), params, salt=salt, tenant=tenant, cache_tenant=cache_tenant)])
    tokens: list[int] = []
    cached = -1
    while core.has_work:
        for message in core.step():
            if isinstance(message, TokenOut):
                tokens += message.tokens
            elif isinstance(message, Done):
                cached = message.usage.cached
    after = core.stats()
    moved = {name: after[name] - before.get(name, 0) for name in ("steps", "computed_tokens", "prompt_tokens_cached")}
    return tokens, cached, moved


def test_what_another_tenant_has_computed_cannot_be_noticed() -> None:
    """What an attacker could time is the work that is done for it: with or without a victim's prefix it is the same."""
    secret = list(range(40))

    def attack(victim_came: bool, cache_tenants: tuple[str, str], salts: tuple[str, str] = ("", "")) -> Any:
        core = EngineCore(EngineConfig(block_size=4, num_gpu_blocks_override=99), FakeWorker(99, 4, vocab_size=99))
        victim, attacker = cache_tenants
        if victim_came:
            run_alone(core, 1, secret, "victim", victim, salts[0])
        return run_alone(core, 2, secret, "attacker", attacker, salts[1])

    unseen = attack(False, ("victim", "attacker"))
    assert unseen[1] == 0
    for salts in (("", ""), ("s", "s"), ("attacker", ""), ("", "victim")):
        assert attack(True, ("victim", "attacker"), salts) == unseen
    # Where the operator lets tenants share, the same test does notice it.
    tokens, cached, moved = attack(True, ("", ""))
    assert tokens == unseen[0] and cached == 39 and moved != unseen[2]
