"""WebSockets at a gateway: chats are its own, responses the main process's, as over HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from support.api.api_live import Live, make_state, run_app
from support.api.socket_asks import hear, hear_ends, socket_of, tell
from support.machine.waits import HANG_SECONDS, wait_until
from websockets.exceptions import InvalidStatus

from rootgraft.api.config import ServerConfig
from rootgraft.api.gateways.gateway_proxy import GatewayProxy
from rootgraft.api.http.app import create_app

_OPTIONS = ServerConfig(api_key=("none", "other"))
_ASKED: dict[str, Any] = {"type": "response.create", "model": "tiny", "input": "hi"}
_ENDS = ("response.completed", "error")


def _live(state: Any, url: str, loop: asyncio.AbstractEventLoop) -> Live:
    return Live(url, state, state.engine.async_engine, state.engine.client, loop)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Live]]:
    """A gateway and its main process."""
    path = str(tmp_path_factory.mktemp("main") / "socket")
    main_state, state = make_state(_OPTIONS), make_state(_OPTIONS)
    with socket.socket(socket.AF_UNIX) as main, socket.create_server(("127.0.0.1", 0)) as sock:
        main.bind(path)
        main.listen()
        proxy = GatewayProxy(create_app(state), path, "")
        with run_app(create_app(main_state), main) as main_loop, run_app(proxy, sock) as loop:
            yield (
                _live(state, f"http://127.0.0.1:{sock.getsockname()[1]}", loop),
                _live(main_state, "http://main", main_loop),
            )
            asyncio.run_coroutine_threadsafe(proxy.close(), loop).result(HANG_SECONDS)


def test_responses_are_made_and_kept_by_the_main_process(both: tuple[Live, Live]) -> None:
    gateway, main = both
    with socket_of(gateway, "/v1/responses") as sock, socket_of(gateway, "/v1/responses", key="other") as other:
        tell(sock, {**_ASKED, "store": False})
        last = hear_ends(sock, 1, _ENDS)[-1]
        assert last["type"] == "response.completed", last
        tell(sock, {**_ASKED, "previous_response_id": last["response"]["id"]})
        assert hear_ends(sock, 1, _ENDS)[-1]["type"] == "response.completed"
        tell(other, {**_ASKED, "previous_response_id": last["response"]["id"]})
        assert hear(other)["error"]["code"] == "previous_response_not_found"
        assert len(main.state.stores.responses) == 2 and not gateway.async_engine.seen
    wait_until(lambda: len(main.state.stores.responses) == 1)


def test_chats_are_answered_by_the_gateway_and_cancelled_in_the_main_process_too(both: tuple[Live, Live]) -> None:
    gateway, main = both
    with socket_of(gateway, "/v1/stream") as sock:
        tell(sock, {"type": "generate", "id": "a", "model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
        assert hear_ends(sock, 1)[-1]["finish_reason"] == "stop" and len(gateway.async_engine.seen) == 1
    main.async_engine.gate = asyncio.Event()
    with socket_of(gateway, "/v1/responses") as sock:
        tell(sock, _ASKED)
        wait_until(lambda: main.state.limits.active == 1)
    wait_until(lambda: main.state.limits.active == 0 and bool(main.async_engine.aborted))
    main.async_engine.gate = None


def test_a_stream_is_resumed_through_a_gateway(both: tuple[Live, Live]) -> None:
    gateway, _ = both
    body = {**_ASKED, "background": True, "stream": True}
    del body["type"]
    with gateway.openai() as client:
        events = list(client.responses.create(**body))
        response_id = events[0].response.id  # type: ignore[union-attr]
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=3))
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[4:]]


def test_a_wrong_key_is_refused_by_the_gateway(both: tuple[Live, Live]) -> None:
    for path in ("/v1/responses", "/v1/stream"):
        with pytest.raises(InvalidStatus) as caught:
            socket_of(both[0], path, key="wrong")
        assert caught.value.response.status_code == 401
