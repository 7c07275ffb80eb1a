"""The live page in a headless Chromium: over the real server under load, and over a fake one for all else."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from support.api.api_live import Live
from support.api.full_snapshot import full_snapshot
from support.api.real_server import RealServer, start
from support.machine.waits import HANG_SECONDS

from rootgraft.api.config import ServerConfig
from rootgraft.engine.messages import Heartbeat
from rootgraft.engine.serving.replica_status import FleetStatus, ReplicaStatus
from rootgraft.engine.snapshot import EngineSnapshot, NamespaceView, NodeView, SequenceView, SlotView
from rootgraft.engine.types import AdapterInfo

pytestmark = pytest.mark.heavy
HANG_MILLISECONDS = 1000 * HANG_SECONDS  # in place of 5 seconds for a state, and of 30 for whatever is done to a page
expect.set_options(timeout=HANG_MILLISECONDS)

Open = Callable[..., Page]
ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
SYSTEM = "You answer for a small shipyard. " + "Orders leave the yard within nine days. " * 12
STATS = {
    "steps": 10,
    "seconds_step": 0.2,
    "seconds_forward": 0.15,
    "seconds_head": 0.02,
    "computed_tokens": 300,
    "pages": 100,
    "pages_available": 80,
    "pages_free": 50,
    "running": 1,
    "waiting": 2,
    "adapters": 1,
    "adapters_host_bytes": 2048,
    "generation_tokens": 40,
    "prompt_tokens": 90,
    "prompt_tokens_cached": 45,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("There is no Chromium on the PATH (on Debian: apt-get install chromium).")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--no-proxy-server"]
        chromium = playwright.chromium.launch(executable_path=found, args=arguments, timeout=HANG_MILLISECONDS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages, which must have nothing to complain about but what a test expects them to."""
    pages: list[Page] = []
    complaints: list[str] = []
    expected: list[str] = []

    def open_one(url: str, *expecting: str, width: int = 1600, height: int = 1000) -> Page:
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(HANG_MILLISECONDS)
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        pages.append(page)
        expected.extend(expecting)
        page.goto(f"{url}/ui")
        return page

    yield open_one
    for page in pages:
        page.close()
    assert [text for text in complaints if not any(part in text for part in expected)] == []


SIDEWAYS = """() => [document.documentElement, ...document.querySelectorAll(".panel .scroll")]
    .filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.id || box.tagName)"""
"""Parts of the page that have to be scrolled sideways."""


def small_snapshot() -> EngineSnapshot:
    """A run of 100 tokens, two that go on from it, an adapter's, and a sequence that extends one of them."""
    names = (NamespaceView(None, "", False), NamespaceView("pirate", "", False))
    nodes = (
        NodeView(1, -1, 0, 100, 7, 1, 0, False),
        NodeView(2, 0, 0, 50, 3, 1, 0, False),
        NodeView(3, 0, 0, 25, 2, 0, 4, False),
        NodeView(4, -1, 1, 80, 1, 0, 9, True),
    )
    sequence = SequenceView(9, 1, 150, 190, 170, 160, 140, 30, 3, 0, None, "", True, 1.5, 0)
    adapter = AdapterInfo("pirate", "pirate", "ready", "device", 8, 2048, False, 0, 0, 4, 3)
    slots = (SlotView("pirate", True, 0, False), SlotView(None, False, 0, False))
    return EngineSnapshot(16, dict(STATS), names, nodes, 640, (sequence,), (adapter,), slots)


def box(page: Page, item: str, index: int = 0) -> dict[str, float]:
    """A box of the tree once it has come to rest."""
    shape = page.locator(f'[data-item="{item}"]').nth(index)
    return {side: float(shape.get_attribute(side) or "nan") for side in ("x", "y", "width", "height")}


def test_the_tree_is_drawn_to_scale(live: Live, open_page: Open) -> None:
    live.client.snapshot = small_snapshot()
    page = open_page(live.url)
    expect(page.locator(".node")).to_have_count(4)
    trunk, first, second, other = (box(page, f"node-{number}") for number in (1, 2, 3, 4))
    assert trunk["x"] == 0 and first["x"] == second["x"] == pytest.approx(trunk["width"])
    assert trunk["width"] / 4 == first["width"] / 2 == pytest.approx(second["width"])
    assert other["width"] == pytest.approx(0.8 * trunk["width"]) and other["x"] == 0
    for child in (first, second):
        assert trunk["y"] <= child["y"] and child["y"] + child["height"] <= trunk["y"] + trunk["height"] + 1
    done, todo, head = (box(page, "sequence-9", index) for index in range(3))
    assert done["x"] == pytest.approx(first["x"] + first["width"])
    assert done["width"] == pytest.approx(todo["width"]) == pytest.approx(0.2 * trunk["width"])
    assert head["x"] == pytest.approx(todo["x"] + todo["width"], abs=2)
    expect(page.locator("#legend")).to_contain_text("base model175 tokens")
    expect(page.locator("#tree-caption")).to_have_text("255 tokens in 4 runs · 640 in older ones not shown")


def test_panels_tell_the_numbers(live: Live, open_page: Open) -> None:
    live.client.snapshot = small_snapshot()
    page = open_page(live.url)
    expect(page.locator("#status")).to_have_text("live")
    page.locator('[data-item="node-1"]').hover()
    expect(page.locator(".tip")).to_have_text("base model\n100 tokens, 0 to 100\nfound 7 times\nin use by 1 sequence")
    page.locator('[data-item="node-4"]').hover()
    expect(page.locator(".tip")).to_contain_text("last used 5 sequences ago\npinned")
    expect(page.locator(".pin")).to_have_count(1)
    expect(page.locator("#step-caption")).to_contain_text("20.0 ms · 30 tokens")
    expect(page.locator("#step .parts")).to_contain_text("forward15.0 ms")
    expect(page.locator("#pool .parts")).to_have_text("in use20%kept for reuse30%free50%")
    expect(page.locator("#sequences tbody tr")).to_have_text("base model140160303grammar1.50 s")
    expect(page.locator("#adapters tbody tr")).to_have_text("piratedevice82.00 KiB475%0unload")
    expect(page.locator("#slots")).to_contain_text("pirateidle")


def test_the_largest_snapshot_fits_every_screen(live: Live, open_page: Open) -> None:
    live.client.snapshot = full_snapshot()
    live.client.snapshot.stats.update(STATS)
    for width in (390, 1280, 1920):
        page = open_page(live.url, width=width)
        expect(page.locator("#sequences tbody tr")).to_have_count(64)
        # Rows of panels that are wide are no longer folded, and this snapshot's numbers are beyond any width.
        assert set(page.evaluate(SIDEWAYS)) <= ({"sequences"} if width == 1920 else set())


def test_requests_failures_and_callers(serve_with: Any, open_page: Open, tmp_path: Path) -> None:
    from support.api.key_files import entry, write

    name = "team-" + "x" * 40
    write(tmp_path / "keys.json", entry(name, tenant="acme"), entry("boss", scopes=["admin", "inference"]))
    live = serve_with(ServerConfig(api_key_file=str(tmp_path / "keys.json")))
    live.client.snapshot = small_snapshot()
    with live.http(headers={"authorization": f"Bearer {name}"}) as http:
        for model in ("tiny", "nobody"):
            http.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 2})
    page = open_page(live.url, "401", width=390)
    page.fill("#key", "boss")
    page.click("#key-form button")
    expect(page.locator("#requests tbody tr", has_text="/v1/completions")).to_have_count(2)
    expect(page.locator("#requests-caption")).to_contain_text("1 failed in the last 5 min")
    page.check("#requests-failed")
    expect(page.locator("#requests tbody tr")).to_contain_text(["404 model_not_found"])
    caller = page.locator("#callers tbody tr", has_text="acme")
    expect(caller).to_contain_text("team-xxxxxxxx…xxxxxxxxxxxxacme21")
    assert page.evaluate(SIDEWAYS) == []
    status = page.locator("#requests tbody tr").first.get_by_role("cell", name="404 model_not_found").bounding_box()
    assert status is not None and status["x"] + status["width"] <= 390


def test_adapters_are_loaded_and_unloaded(live: Live, open_page: Open) -> None:
    live.client.snapshot = small_snapshot()
    page = open_page(live.url, "400")
    asked: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        refusal = {"error": {"message": "It is in use.", "code": None}}
        route.fulfill(body="Success: done.") if len(asked) < 3 else route.fulfill(status=400, json=refusal)

    page.route("**/v1/*load_lora_adapter", answer)
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#adapter-box summary")
    page.fill("#adapter-name", "shell")
    page.fill("#adapter-path", "adapters/shell")
    page.click("#adapter-form button")
    expect(page.locator("#adapters-said")).to_have_text("load shell: done")
    page.click('[data-action="unload"]')
    expect(page.locator("#adapters-said")).to_have_text("unload pirate: done")
    assert asked == [{"lora_name": "shell", "lora_path": "adapters/shell"}, {"lora_name": "pirate"}]
    page.click('[data-action="unload"]')
    expect(page.locator("#adapters-said")).to_have_text("It is in use.")


def test_a_conversation_with_a_tool_and_its_code(live: Live, open_page: Open) -> None:
    live.client.snapshot = small_snapshot()
    page = open_page(live.url)
    expect(page.locator("#ask-model option")).to_have_count(3)
    page.route("**/tokenize", lambda route: route.fulfill(json={"tokens": []}))
    page.route("**/detokenize", lambda route: route.fulfill(json={"prompt": ""}))
    page.evaluate(STREAM)
    page.click("#tools-form summary")
    page.check("#ask-offers-tools")
    page.fill("#ask-user", "Who is Vera?")
    page.click("#ask-go")
    page.wait_for_selector("#answer[aria-busy=true]")
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "find_contact", "arguments": '{"na'}}
    page.evaluate("call => delta({ tool_calls: [call] })", call)
    page.evaluate("delta({ tool_calls: [{ index: 0, function: { arguments: 'me\": \"Vera\"}' } }] }, 'tool_calls')")
    end_stream(page, cached=0)
    expect(page.locator("#answer")).to_have_text('find_contact {"name": "Vera"}')
    page.click("#ask-continue")
    expect(page.locator("#ask-user-label")).to_have_text("Result of find_contact")
    expect(page.locator("#turns li")).to_have_text(["user Who is Vera?", 'assistant find_contact({"name": "Vera"})'])
    page.fill("#ask-user", "It's a friend.")
    page.click("#code-box summary")
    expect(page.locator("#code")).to_contain_text('"tool_call_id": "call-1"')
    shown = shlex.split(page.locator("#code").inner_text())
    body = json.loads(shown[shown.index("-d") + 1])
    assert shown[1] == f"{live.url}/v1/chat/completions" and body["messages"][-1]["content"] == "It's a friend."
    page.select_option("#code-kind", "Python")
    expect(page.locator("#code")).to_contain_text("from openai import OpenAI")
    program = ast.parse(page.locator("#code").inner_text())
    [called] = [node for node in ast.walk(program) if isinstance(node, ast.Call) and node.keywords[:1]][1:]
    assert {each.arg: ast.literal_eval(each.value) for each in called.keywords} == body
    page.click("#turns-clear")
    expect(page.locator("#ask-user-label")).to_have_text("User")
    expect(page.locator("#turns-box")).to_be_hidden()


def test_an_empty_server_says_so(live: Live, open_page: Open) -> None:
    live.client.snapshot = EngineSnapshot(16, {**STATS, "steps": 0, "running": 0}, (), (), 0, ())
    page = open_page(live.url)
    expect(page.locator("#tree")).to_contain_text("The tree is empty")
    expect(page.locator("#step")).to_contain_text("No step yet")
    expect(page.locator("#sequences")).to_contain_text("No sequence is running")
    expect(page.locator("#adapters")).to_contain_text("--enable-lora")


def test_curves_have_points(live: Live, open_page: Open) -> None:
    live.client.snapshot = small_snapshot()
    history = live.state.observers.metrics.history
    for number in range(4):
        history._last = (history._clock() - 2.0, {"generation_tokens": 100.0 * number})
        history.add_between(0.02)
        live.state.observers.metrics.on_heartbeat(
            Heartbeat({"generation_tokens": 100.0 * number + 80, "running": 5}, {})
        )
    page = open_page(live.url)
    expect(page.locator(".curve .now").first).to_contain_text("40 tokens/s")
    expect(page.locator(".curve .now").nth(3)).to_have_text(re.compile("20.0 ms / 20.0 ms"))


def test_a_key_is_asked_for_and_kept(serve_with: Any, open_page: Open) -> None:
    live = serve_with(ServerConfig(api_key=("sesame",)))
    live.client.snapshot = small_snapshot()
    page = open_page(live.url, "401")
    expect(page.locator("#key-form")).to_be_visible()
    expect(page.locator("main")).to_be_hidden()
    page.fill("#key", "wrong")
    page.click("#key-form button")
    expect(page.locator("#key-error")).to_have_text("That key is not valid here.")
    page.fill("#key", "sesame")
    page.click("#key-form button")
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#key-form")).to_be_hidden()
    page.reload()
    expect(page.locator(".node")).to_have_count(4)
    assert "sesame" not in page.url and page.evaluate("localStorage.length + document.cookie.length") == 0


def test_a_key_without_the_scope_has_the_playground(serve_with: Any, open_page: Open, tmp_path: Path) -> None:
    from support.api.key_files import entry, write

    write(tmp_path / "keys.json", entry("user"))
    live = serve_with(ServerConfig(api_key_file=str(tmp_path / "keys.json")))
    page = open_page(live.url, "401", "403")
    page.fill("#key", "user")
    page.click("#key-form button")
    expect(page.locator("#notice")).to_contain_text("scope 'admin'")
    expect(page.locator("#tree-panel")).to_be_hidden()
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.locator("#ask-model option")).to_have_count(3)
    page.click("#ask-go")
    expect(page.locator("#answer")).to_have_text("answer 0")


def test_what_a_model_writes_is_text(live: Live, open_page: Open) -> None:
    live.client.snapshot = small_snapshot()
    said = '<img src="x" onerror="document.title=1"><script>document.title=1</script>'
    live.async_engine.say = lambda request, index: said
    page = open_page(live.url)
    expect(page.locator("#ask-model option")).to_have_count(3)
    page.fill("#ask-user", "<b id=bold>é</b>")
    page.click("#ask-go")
    expect(page.locator("#answer")).to_have_text(said)
    expect(page.locator("#prompt .computed").last).to_be_visible()
    assert page.locator("#playground img, #bold").count() == 0 and page.title() == "rootgraft"


def test_replicas_of_a_fleet(live: Live, open_page: Open) -> None:
    live.client.snapshot = small_snapshot()
    first = ReplicaStatus("replica-1", 0, "serving", "process 7", 90.0, 0.1, ("<b>sql</b>",), STATS)
    told = FleetStatus((first, replace(first, name="replica-3", state="draining", stats={})), 2, 1, 0, (0, 3))
    live.client.engine_stats = dict
    live.client.status = lambda: told
    page = open_page(live.url)
    expect(page.locator("#replicas tbody tr")).to_have_count(2)
    expect(page.locator("#replicas tbody tr").first).to_contain_text("replica-1serving1250%90.0 sprocess 7<b>sql</b>")
    expect(page.locator("#fleet-caption")).to_contain_text("1 of 2 replicas serve (0 to 3 by load) · 1 starting")
    told = FleetStatus((), 0, bounds=(0, 3))
    expect(page.locator("#replicas")).to_have_text("No replica runs now; the first request starts one.")
    del live.client.status
    expect(page.locator("#fleet-panel")).to_be_hidden()


def test_mistakes_and_stops_in_the_playground(live: Live, open_page: Open) -> None:
    live.client.snapshot = small_snapshot()
    page = open_page(live.url, "404")
    expect(page.locator("#ask-model option")).to_have_count(3)
    page.click("#ask-form summary")
    page.check("#ask-structured")
    page.fill("#ask-schema", "{")
    page.click("#ask-go")
    expect(page.locator("#ask-usage")).to_contain_text("The schema is not valid JSON")
    page.uncheck("#ask-structured")
    page.select_option("#ask-model", "")
    page.fill("#ask-other", "nobody")
    page.click("#ask-go")
    expect(page.locator("#ask-usage")).to_contain_text("nobody")
    page.select_option("#ask-model", "tiny")
    live.async_engine.fail_after = (2, ValueError("broken"))
    page.click("#ask-go")
    expect(page.locator("#ask-usage")).to_contain_text("Internal server error")
    expect(page.locator("#ask-go")).to_be_enabled()


def test_a_server_that_goes_and_comes_back(live: Live, open_page: Open) -> None:
    live.client.snapshot = small_snapshot()
    page = open_page(live.url, "503")
    expect(page.locator("#status")).to_have_text("live")
    live.client.is_alive = False
    expect(page.locator("#status")).to_have_text("reconnecting")
    expect(page.locator("#notice")).to_have_text("The engine is not running.")
    expect(page.locator(".node")).to_have_count(4)
    live.client.is_alive = True
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#notice")).to_be_hidden()


def test_parts_live_beside_a_source_that_does_not_answer(live: Live, open_page: Open) -> None:
    live.client.snapshot = small_snapshot()
    page = open_page(live.url)
    expect(page.locator("#ask-model option")).to_have_count(3)
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/ui/state*", hold)
    page.reload()
    expect(page.locator("#ask-model option")).to_have_count(3)
    page.click("#ask-go")
    expect(page.locator("#answer")).to_have_text("answer 0")
    assert held, "the panels' data were asked for, and have not come"
    page.unroute("**/ui/state*")
    page.route("**/v1/models", hold)
    page.reload()
    expect(page.locator("#sequences tbody tr")).to_have_count(1)
    expect(page.locator("#requests tbody tr")).not_to_have_count(0)
    page.unroute("**/v1/models")
    page.route("**/tokenize", hold)
    page.reload()
    expect(page.locator("#ask-model option")).to_have_count(3)
    for _ in range(2):
        page.click("#ask-go")
        expect(page.locator("#ask-usage")).to_contain_text("in the answer")
        expect(page.locator("#ask-go")).to_be_enabled()


STREAM = """() => {
    window.encoder = new TextEncoder();
    const real = window.fetch;
    window.fetch = (path, options) => {
      if (path !== "v1/chat/completions") return real(path, options);
      const body = new ReadableStream({ start: (controller) => (window.stream = controller) });
      return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
    };
    window.send = (event) => window.stream.enqueue(encoder.encode(`data: ${JSON.stringify(event)}\\n\\n`));
    window.delta = (delta, finish_reason = null) => window.send({ choices: [{ index: 0, delta, finish_reason }] });
}"""  # a chat whose events a test sends


def end_stream(page: Page, cached: int) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}}
    page.evaluate("delta({}, 'length')")
    page.evaluate("usage => send({ choices: [], usage })", usage)
    page.evaluate("stream.enqueue(encoder.encode('data: [DONE]\\n\\n'))")


def test_a_streamed_answer(live: Live, open_page: Open) -> None:
    """A thought apart from it, scrolled along only at its end, and read aloud once; the keyboard is enough."""
    live.client.snapshot = small_snapshot()
    page = open_page(live.url)
    expect(page.locator("#ask-model option")).to_have_count(3)
    page.evaluate(STREAM)
    answer = page.locator("#answer")
    page.focus("#ask-user")
    page.keyboard.press("Control+Enter")
    expect(answer).to_have_attribute("aria-busy", "true")
    page.evaluate("stream.enqueue(encoder.encode(': ping\\n\\n'))")
    page.evaluate("delta({ reasoning_content: '<i>so</i>' })")
    expect(page.locator("#thought")).to_have_text("<i>so</i>")
    for number in range(60):
        page.evaluate("number => delta({ content: `line ${number}\\n` })", number)
    expect(answer).to_contain_text("line 59")
    assert answer.evaluate("box => box.scrollHeight - box.scrollTop - box.clientHeight") < 8
    answer.evaluate("box => (box.scrollTop = 40)")
    page.evaluate("delta({ content: 'the end' })")
    expect(answer).to_contain_text("the end")
    assert answer.evaluate("box => box.scrollTop") == 40, "who reads above stays there"
    page.route("**/tokenize", lambda route: route.fulfill(json={"tokens": [1, 2, 3]}))
    texts = {2: "ab\ufffd", 3: "ab\u4f60"}  # the second token is a part of a character
    page.route(
        "**/detokenize",
        lambda route: route.fulfill(json={"prompt": texts[len(route.request.post_data_json["tokens"])]}),
    )
    end_stream(page, cached=2)
    expect(page.locator("#ask-usage")).to_contain_text("cut off at Max tokens · 2 of 3 prompt tokens cached")
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(page.locator("#prompt .cached")).to_have_text("ab")
    expect(page.locator("#prompt .computed")).to_have_text("\u4f60")
    page.focus("#ask-go")
    page.keyboard.press("Enter")
    expect(page.locator("#ask-stop")).to_be_focused()
    expect(page.locator("#thought-box")).to_be_hidden()
    page.evaluate("stream.error(new TypeError('of the browser'))")
    expect(page.locator("#ask-usage")).to_have_text("The connection broke off; the answer is not whole.")
    expect(page.locator("#ask-go")).to_be_focused()


def test_what_has_not_changed_stays_on_the_page(live: Live, open_page: Open) -> None:
    """So a tooltip stays, and a text that somebody selects."""
    live.client.snapshot = small_snapshot()
    page = open_page(live.url)
    expect(page.locator("#adapters tbody tr")).to_have_count(1)
    parts = [page.locator(path).first.element_handle() for path in ("#step .parts li", "#slots .slot", "#adapters td")]
    live.client.snapshot = replace(small_snapshot(), adapters=(), stats={**STATS, "pages_free": 10})
    expect(page.locator("#pool .parts")).to_contain_text("free10%")
    expect(page.locator("#adapters")).to_contain_text("No adapter is loaded yet")
    assert [part.evaluate("part => part.isConnected") for part in parts] == [True, True, False]
    assert page.locator("#pool .bar span").last.evaluate("part => part.style.flexGrow") == "0.1"


def test_a_server_that_cannot_be_reached(live: Live, open_page: Open) -> None:
    live.client.snapshot = small_snapshot()
    page = open_page(live.url, "ERR_FAILED")
    expect(page.locator("#ask-model option")).to_have_count(3)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.click("#ask-go")
    expect(page.locator("#ask-usage")).to_have_text("The server cannot be reached.")


@pytest.fixture(scope="module")
def busy() -> Iterator[RealServer]:
    """The real server with adapters, asked by three clients without a pause."""
    server = start("--enable-lora", "--lora-dir", str(ADAPTERS), "--max-loras", "2")
    over = threading.Event()

    def ask(model: str) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Question {turn % 7}?"}]
            server.client.chat.completions.create(  # type: ignore[call-overload]
                model=model, messages=messages, max_tokens=48, temperature=1, extra_body={"ignore_eos": True}
            )

    threads = [threading.Thread(target=ask, args=(model,)) for model in ("small", "pirate", "shell")]
    for thread in threads:
        thread.start()
    yield server
    over.set()
    for thread in threads:
        thread.join()
    server.close()


def test_a_server_under_load(busy: RealServer, open_page: Open) -> None:
    page = open_page(str(busy.http.base_url).rstrip("/"))
    expect(page.locator("#legend")).to_contain_text("pirate")
    expect(page.locator("#legend")).to_contain_text("shell")
    expect(page.locator(".node.leased").first).to_be_visible()
    expect(page.locator(".head").first).to_be_attached()
    expect(page.locator("#sequences tbody tr").first).to_be_visible()
    expect(page.locator(".slot:not(.vacant)")).to_have_count(2)
    expect(page.locator(".node").nth(5)).to_be_attached()
    expect(page.locator("#step .parts")).to_contain_text("forward")


def test_the_playground_on_the_real_model(busy: RealServer, open_page: Open) -> None:
    page = open_page(str(busy.http.base_url).rstrip("/"))
    page.select_option("#ask-model", "pirate")
    page.fill("#ask-max", "60")
    for _ in range(2):
        page.click("#ask-go")
        expect(page.locator("#ask-usage")).to_contain_text("in the answer")
        expect(page.locator("#prompt span").first).to_be_visible()
    assert page.locator("#answer").inner_text().strip()
    assert "Vera Hughes" in page.locator("#prompt .cached").inner_text()
    assert page.locator("#prompt .computed").inner_text().strip() == "↵"  # the prompt's last token
    page.click("#ask-form summary")
    page.check("#ask-structured")
    page.click("#ask-go")
    expect(page.locator("#answer-check")).to_have_text("valid JSON")
    assert json.loads(page.locator("#answer").inner_text()).keys() == {"name", "company", "email", "phone"}
