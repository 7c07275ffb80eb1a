"""The live page's files and data: who may have them, how often the engine is asked, how large an answer is."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.api.api_live import Live
from support.api.full_snapshot import full_snapshot
from support.machine.waits import wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.observe import live_page
from rootgraft.api.observe.live_page import FILES, PATHS
from rootgraft.engine.messages import Heartbeat

Start = Callable[[ServerConfig], Live]


def test_files_have_types_and_a_policy(live: Live) -> None:
    with live.http() as http:
        for path in PATHS - {"/", "/ui/"}:
            reply = http.get(path)
            kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}.get(path.rpartition(".")[2])
            assert reply.status_code == 200 and reply.headers["content-type"].startswith(kind or "text/html")
            policy = reply.headers["content-security-policy"].split("; ")
            assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(policy)
            assert "unsafe" not in reply.headers["content-security-policy"]
            assert reply.headers["x-content-type-options"] == "nosniff" and reply.headers["cache-control"] == "no-cache"
            for kind in ("opener", "resource"):
                assert reply.headers[f"cross-origin-{kind}-policy"] == "same-origin"
        assert http.get("/ui/").headers["location"] == "../ui"
        for path in ("/ui/nope.js", "/ui/..%2fapp.py", "/ui/index.html", "/ui/../app.py"):
            assert http.get(path).status_code == 404
        assert http.post("/ui").status_code == 405


def test_the_root_leads_a_browser_to_the_page_and_tells_others_where_things_are(live: Live) -> None:
    with live.http() as http:
        browser = http.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert browser.status_code == 307 and browser.headers["location"] == "ui"
        assert http.get("/").json() == {"server": "rootgraft", "openai": "v1", "health": "health", "page": "ui"}


def test_nothing_comes_from_elsewhere_and_nothing_reads_html() -> None:
    for name, data in FILES.items():
        text = data.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z]", text), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|style=|onclick=", text
        )
    html = FILES["index.html"].decode()
    assert set(re.findall(r'(?:src|href)="([^"]+)"', html)) <= {f"ui/{name}" for name in FILES}
    for name, data in FILES.items():
        imported = re.findall(r'from "\./([^"]+)"', data.decode())
        assert set(imported) <= FILES.keys(), name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(theme: str) -> None:
    """Contrasts of WCAG 2, level AA: 4.5 for text, 3 for the edges of fields."""
    light, dark = (
        dict(re.findall(r"--([\w-]+): #(\w{6});", block))
        for block in re.findall(r":root \{(.*?)\}", FILES["page.css"].decode(), re.DOTALL)
    )
    colours = {name: bytes.fromhex(value) for name, value in (light if theme == "light" else dark).items()}
    pairs = [(text, back) for text in ("text", "muted") for back in ("card", "back", "faint")]
    pairs += [("accent-text", "accent"), ("good", "card"), ("bad", "card"), ("card", "text")]
    assert {pair: ratio for pair in pairs if (ratio := _contrast(*(colours[name] for name in pair))) < 4.5} == {}
    assert _contrast(colours["edge"], colours["card"]) >= 3
    on = colours["text"] if theme == "light" else bytes.fromhex("0b1015")  # .label.on
    for number in range(9):
        hue = colours[f"ns-{number}"]
        idle, leased = (
            bytes(round(share * a + (1 - share) * b) for a, b in zip(hue, colours["card"], strict=True))
            for share in (0.3, 0.82)
        )
        assert _contrast(colours["text"], idle) >= 4.5 and _contrast(on, leased) >= 4.5, number


def _contrast(one: bytes, other: bytes) -> float:
    """Contrast ratio of two sRGB colours, by WCAG 2."""

    def luminance(colour: bytes) -> float:
        linear = [x / 12.92 if (x := byte / 255) <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for byte in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_the_files_are_in_the_package() -> None:
    text = (Path(__file__).parents[3] / "setup.py").read_text()
    assert '"rootgraft.api": ["ui/*"]' in text
    assert all(path.is_file() for path in live_page._FOLDER.iterdir())


def test_what_the_page_shows(live: Live) -> None:
    live.client.snapshot = full_snapshot()
    history = live.state.observers.metrics.history
    history.take({})
    with live.http() as http:
        body = http.get("/ui/state").json()
    assert body["server"].items() >= {"model": "tiny", "version": "1.2.3", "draining": False}.items()
    assert body["engine"] == json.loads(orjson.dumps(full_snapshot()))
    assert isinstance(body["history"], list)


def test_answers_are_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.client.snapshot = full_snapshot()
    for _ in range(3):
        live.state.observers.metrics.on_heartbeat(Heartbeat({"running": 3}, {}))
    with live.http() as http:
        assert len(http.get("/ui/state").content) < 160_000
        assert http.get("/ui/state", params={"since": 1e9}).json()["history"] == []
        for since in ("x", "-2", "nan"):
            reply = http.get("/ui/state", params={"since": since})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "since"


def test_the_engine_is_asked_seldom_however_many_watch(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with live.http() as http:
        monkeypatch.setattr(live_page, "LEAST_SECONDS", 1000.0)
        assert {http.get("/ui/state").status_code for _ in range(20)} == {200}
        assert live.client.num_snapshots == 1
        monkeypatch.setattr(live_page, "LEAST_SECONDS", 0.0)
        assert http.get("/ui/state").status_code == 200
        assert live.client.num_snapshots == 2


def test_a_long_step_shows_the_snapshot_of_before(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(live_page, "PATIENCE", 0.05)
    gate = live.client.gate = asyncio.Event()
    with live.http() as http:
        told = http.get("/ui/state").json()
        assert told["engine"] is None and "has taken more than" in told["waiting"]
        assert told["server"]["model"] == "tiny" and "failures" in told["requests"], "all else is told meanwhile"
        live.loop.call_soon_threadsafe(gate.set)
        wait_until(lambda: http.get("/ui/state").json()["waiting"] is None)
        live.client.gate = asyncio.Event()
        live.client.snapshot = full_snapshot()
        assert http.get("/ui/state").json()["engine"]["nodes"] == []
        live.loop.call_soon_threadsafe(live.client.gate.set)
        wait_until(lambda: len(http.get("/ui/state").json()["engine"]["nodes"]) > 0)


def test_an_engine_that_is_gone(live: Live) -> None:
    live.client.is_alive = False
    with live.http() as http:
        assert http.get("/ui/state").json()["error"]["code"] == "engine_dead"
        assert http.get("/ui").status_code == 200


def test_data_is_for_admins_and_files_for_all(serve_with: Start, tmp_path: Path) -> None:
    from support.api.key_files import entry, write

    write(tmp_path / "keys.json", entry("user"), entry("boss", scopes=["admin"]), entry("meter", scopes=["metrics"]))
    live = serve_with(ServerConfig(api_key_file=str(tmp_path / "keys.json")))
    live.client.snapshot = full_snapshot()
    expected: dict[str, Any] = {"user": 403, "meter": 403, "boss": 200, "nobody": 401}
    for key, status in expected.items():
        with live.http(headers={"authorization": f"Bearer {key}"}) as http:
            reply = http.get("/ui/state")
            assert reply.status_code == status and ("tttt" in reply.text) == (status == 200)
            assert http.get("/ui").status_code == 200
            if status == 403:
                assert "'admin'" in reply.json()["error"]["message"]
