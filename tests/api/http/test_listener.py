# ruff: noqa: E501 (messages)
"""Where the server listens: TLS with checked certificates, Unix domain sockets, paths of proxies, other origins."""

from __future__ import annotations

import asyncio
import datetime
import select
import socket
import ssl
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
import trustme
from support.machine.server_process import Engine, interrupt, replace_engine, run
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.http import server, tls
from rootgraft.api.http.listener import listening
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    for engine in replace_engine(monkeypatch):
        engine.loaded.set()
        yield engine


class Pki:
    """Files of an authority, and of certificates that it signs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(str(self.ca_file))

    def issue(self, name: str, *, days: float = 90, ca: trustme.CA | None = None) -> dict[str, str]:
        """Options of a certificate for 127.0.0.1 that ends in so many days."""
        leaf = (ca or self.ca).issue_cert("127.0.0.1", not_after=NOW + datetime.timedelta(days=days))
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        for number, blob in enumerate(leaf.cert_chain_pems):
            blob.write_to_path(str(certificate), append=number > 0)
        leaf.private_key_pem.write_to_path(str(key))
        return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}

    def trusting(self, **given: Any) -> dict[str, Any]:
        """Options of an httpx client that trusts the authority."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        if "certificate" in given:
            files = given["certificate"]
            context.load_cert_chain(files["ssl_certfile"], files["ssl_keyfile"])
        return {"verify": context}


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def until_ready(http: httpx.Client) -> None:
    wait_until(lambda: http.get("/ready").status_code == 200)


def test_https_with_openais_client(engine: Engine, pki: Pki) -> None:
    def steps(http: httpx.Client) -> None:
        until_ready(http)
        client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", http_client=http)
        assert client.completions.create(model="org/small", prompt="x").choices[0].text == "answer 0"
        streamed = client.completions.create(model="org/small", prompt="x", stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == "answer 0"
        too_large = http.post("/v1/completions", content=b"x" * 2000)
        assert too_large.status_code == 413
        interrupt()

    options = pki.issue("server")
    assert run(steps, scheme="https", connection=pki.trusting(), max_request_bytes=1024, **options) == 0


def test_clients_must_have_a_certificate(engine: Engine, pki: Pki) -> None:
    options = pki.issue("server") | {"ssl_ca_certs": str(pki.ca_file), "ssl_cert_reqs": 2}

    def steps(http: httpx.Client) -> None:
        until_ready(http)
        stranger = pki.issue("stranger", ca=trustme.CA())
        for connection in (pki.trusting(), pki.trusting(certificate=stranger)):
            with (
                httpx.Client(base_url=http.base_url, trust_env=False, timeout=HANG_SECONDS, **connection) as other,
                pytest.raises(httpx.TransportError),
            ):
                other.get("/health")
        interrupt()

    known = pki.trusting(certificate=pki.issue("client"))
    assert run(steps, scheme="https", connection=known, **options) == 0


def served_until(port: int, ca_file: Path) -> str:
    """The end of the certificate that a server shows."""
    context = ssl.create_default_context(cafile=str(ca_file))
    with (
        socket.create_connection(("127.0.0.1", port)) as sock,
        context.wrap_socket(sock, server_hostname="127.0.0.1") as s,
    ):
        return str((s.getpeercert() or {})["notAfter"])


def test_a_renewed_certificate_is_loaded_and_a_broken_one_is_not(
    engine: Engine, pki: Pki, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "REFRESH_SECONDS", 0.02)
    options = pki.issue("server", days=50)

    def steps(http: httpx.Client) -> None:
        until_ready(http)
        port = http.base_url.port or 0
        first = served_until(port, pki.ca_file)
        pki.issue("server", days=70)
        wait_until(lambda: served_until(port, pki.ca_file) != first)
        second = served_until(port, pki.ca_file)
        Path(options["ssl_certfile"]).write_text("nothing")
        wait_until(lambda: "the certificate was not reloaded" in caplog.text)
        assert served_until(port, pki.ca_file) == second
        interrupt()

    assert run(steps, scheme="https", connection=pki.trusting(), enable_ssl_refresh=True, **options) == 0


def greeted(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
    """The session of a connection that the server answers; None if it does not let the client in."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port)) as sock,
            context.wrap_socket(sock, server_hostname="127.0.0.1", session=session) as client,
        ):
            client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return client.session if client.recv(1000) else None
    except OSError:
        return None


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_clients_of_an_authority_that_was_removed_are_refused(
    engine: Engine, pki: Pki, monkeypatch: pytest.MonkeyPatch, newest: ssl.TLSVersion
) -> None:
    monkeypatch.setattr(tls, "REFRESH_SECONDS", 0.02)
    other = trustme.CA()
    authorities = pki.folder / "authorities.pem"
    authorities.write_bytes(pki.ca.cert_pem.bytes() + other.cert_pem.bytes())
    options = pki.issue("server") | {"ssl_ca_certs": str(authorities), "ssl_cert_reqs": 2}

    def steps(http: httpx.Client) -> None:
        until_ready(http)
        port = http.base_url.port or 0
        kept = pki.trusting(certificate=pki.issue("kept"))["verify"]
        removed = pki.trusting(certificate=pki.issue("removed", ca=other))["verify"]
        removed.maximum_version = newest
        session = greeted(port, removed)
        assert session is not None and greeted(port, removed, session)
        authorities.write_bytes(pki.ca.cert_pem.bytes())
        wait_until(lambda: not greeted(port, removed))
        assert not greeted(port, removed, session)
        assert greeted(port, kept)
        interrupt()

    known = pki.trusting(certificate=pki.issue("client"))
    assert run(steps, scheme="https", connection=known, enable_ssl_refresh=True, **options) == 0


async def test_a_file_that_goes_while_it_is_read_does_not_end_the_renewal(
    pki: Pki, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "REFRESH_SECONDS", 0.001)
    options = ServerConfig(**pki.issue("server"))
    context = tls.tls_context(options)
    assert context is not None
    before, load = context.loaded, tls._load_files
    monkeypatch.setattr(tls, "_load_files", raising := Mock(side_effect=FileNotFoundError("gone")))
    renewal = asyncio.create_task(tls.refresh_certificates(context, options))
    await asyncio.sleep(0)
    pki.issue("server", days=60)
    while raising.call_count < 3:
        await asyncio.sleep(0.001)
    assert context.loaded is before and caplog.text.count("was not reloaded: gone") == 1
    monkeypatch.setattr(tls, "_load_files", load)
    while context.loaded is before:
        await asyncio.sleep(0.001)
    renewal.cancel()


def locked(pki: Pki, options: dict[str, str]) -> dict[str, str]:
    key = pki.folder / "locked.key"
    command = ["openssl", "pkey", "-in", options["ssl_keyfile"], "-aes128", "-passout", "pass:secret", "-out", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return options | {"ssl_keyfile": str(key)}


def der(pki: Pki, options: dict[str, str]) -> dict[str, str]:
    binary = pki.folder / "server.der"
    binary.write_bytes(ssl.PEM_cert_to_DER_cert(Path(options["ssl_certfile"]).read_text().split("\n\n")[0].strip()))
    return options | {"ssl_certfile": str(binary)}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda pki, options: options | {"ssl_certfile": str(pki.folder / "none.crt")}, r"--ssl-certfile: .*none\.crt cannot be read: No such file"),
        (lambda pki, options: options | {"ssl_keyfile": str(pki.folder / "none.key")}, r"--ssl-keyfile: .*none\.key cannot be read: No such file"),
        (lambda pki, options: options | {"ssl_keyfile": pki.issue("other")["ssl_keyfile"]}, r"--ssl-keyfile: the key in .*other\.key does not match the certificate"),
        (lambda pki, options: options | {"ssl_keyfile": str(pki.ca_file)}, r"--ssl-keyfile: .*ca\.pem contains no PEM private key .* Try: openssl pkey"),
        (lambda pki, options: {"ssl_certfile": options["ssl_certfile"]}, r"server\.crt contains no private key: give its file with --ssl-keyfile"),
        (locked, r"locked\.key is locked with a passphrase\. Try: openssl pkey -in .*locked\.key"),
        (der, r"server\.der contains no PEM certificate\. Try: openssl x509 -inform der"),
        (lambda pki, options: pki.issue("old", days=-1), r"clients will refuse .*old\.crt: certificate has expired"),
        (lambda pki, options: options | {"ssl_ca_certs": options["ssl_keyfile"], "ssl_cert_reqs": 2}, r"--ssl-ca-certs: .*server\.key contains no PEM certificate"),
        (lambda pki, options: options | {"ssl_ciphers": "NOTHING"}, r"--ssl-ciphers: OpenSSL has none of the ciphers in NOTHING"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_certificate_is_told_before_anything_starts(
    engine: Engine, pki: Pki, change: Callable[[Pki, dict[str, str]], dict[str, Any]], fault: str
) -> None:
    options = change(pki, pki.issue("server"))
    with pytest.raises(ConfigError, match=fault):
        server.serve(EngineConfig(), ServerConfig(port=0, **options))
    assert engine.client is None


def test_a_certificate_that_ends_soon_is_told(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    assert tls.tls_context(ServerConfig(**pki.issue("late", days=13))) is not None
    assert "late.crt expires in 13 days" in caplog.text
    caplog.clear()
    assert tls.tls_context(ServerConfig(**pki.issue("fresh", days=15))) is not None
    assert not caplog.text


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-certfile"),
        ({"ssl_cert_reqs": 2, "ssl_certfile": "c"}, "--ssl-cert-reqs 2 needs --ssl-ca-certs"),
        ({"ssl_cert_reqs": 3, "ssl_certfile": "c"}, "--ssl-cert-reqs must be one of 0, 1, 2, not 3"),
        ({"enable_ssl_refresh": True}, "--enable-ssl-refresh needs --ssl-certfile"),
        ({"root_path": "llm"}, "--root-path must be a path such as /llm, not llm"),
        ({"root_path": "/llm?"}, "--root-path must be a path"),
        ({"root_path": "/v1/x"}, "--root-path must not begin with /v1"),
        ({"uds": ""}, "--uds must name a file"),
        ({"allow_credentials": True}, "--allow-credentials needs --allowed-origins with named origins"),
        (
            {"allow_credentials": True, "allowed_origins": ("*",)},
            "--allow-credentials needs --allowed-origins with named origins",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        ServerConfig(**options)


# httpcore leaves a socket open that cannot connect, as before the server has opened its own.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_unix_domain_socket(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    transport = httpx.HTTPTransport(uds=str(path))

    def steps(http: httpx.Client) -> None:
        until_ready(http)
        assert http.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"] == "answer 0"
        with pytest.raises(ConfigError, match=r"--uds: another process listens on .*server\.sock"):
            server.serve(EngineConfig(), ServerConfig(uds=str(path)))
        assert stat.S_ISSOCK(path.stat().st_mode)
        interrupt()

    assert run(steps, connection={"transport": transport}, uds=str(path)) == 0
    assert not path.exists()


def test_files_in_the_place_of_a_socket(tmp_path: Path) -> None:
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    with listening(ServerConfig(uds=str(stale))) as listener:
        assert listener.url == f"unix:{stale}" and stale.exists()
    assert not stale.exists()
    with pytest.raises(KeyError), listening(ServerConfig(uds=str(stale))):
        raise KeyError
    assert not stale.exists()
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    for path, fault in (
        (kept, r"notes\.txt exists and is not a socket"),
        (tmp_path / "none" / "s", "No such file or directory"),
        (tmp_path / ("x" * 200), "AF_UNIX path too long"),
    ):
        with pytest.raises(ConfigError, match=fault), listening(ServerConfig(uds=str(path))):
            pass
    assert kept.read_text() == "mine"


def test_a_socket_is_that_of_one_server_from_its_first_moment_to_its_last(tmp_path: Path) -> None:
    options = ServerConfig(uds=str(tmp_path / "server.sock"))
    with listening(options) as first:
        for _ in range(3):  # the third time the queue of one client, which nobody accepts yet, is full
            with (
                pytest.raises(ConfigError, match=r"--uds: another process listens on .*server\.sock"),
                listening(options),
            ):
                pass
        first.socket.close()  # as the server does before its last streams have ended
        successor = listening(options)
        second = successor.__enter__()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(options.uds))
    second.socket.close()
    successor.__exit__(None, None, None)
    assert not list(tmp_path.iterdir())


def test_systemd_is_told_of_the_start_and_of_the_end(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(HANG_SECONDS)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        engine.loaded.clear()

        def steps(http: httpx.Client) -> None:
            assert http.get("/ready").status_code == 503
            assert select.select([manager], [], [], 0)[0] == []
            engine.loaded.set()
            assert manager.recv(100) == b"READY=1"
            interrupt()
            assert manager.recv(100) == b"STOPPING=1"

        assert run(steps) == 0


@pytest.mark.parametrize("root", ["/llm", "/team/llm/"])
def test_a_proxys_path_is_stripped_or_not(serve_with: Any, root: str) -> None:
    live = serve_with(ServerConfig(root_path=root, api_key=("k",)))
    prefix = root.rstrip("/")
    with live.http(headers={"authorization": "Bearer k"}) as http:
        for path in ("/v1/models", f"{prefix}/v1/models"):
            assert http.get(path).json()["data"][0]["id"] == "tiny"
        assert (
            http.get(f"{prefix}x/v1/models").status_code == http.get(f"{prefix}{prefix}/v1/models").status_code == 404
        )
        assert http.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": prefix}]
    with live.http() as http:  # the paths that need no key are those of the server, not those with another path before
        assert http.get(f"{prefix}/health").status_code == 200
        assert http.get(f"{prefix}/v1/models").status_code == 401
        assert http.post(f"{prefix}/v1/messages", json={}).json()["type"] == "error"


def test_origins_with_cookies_methods_and_headers(serve_with: Any) -> None:
    origin = "https://chat.example.org"
    live = serve_with(
        ServerConfig(
            allowed_origins=(origin,), allow_credentials=True, allowed_methods=("POST",), allowed_headers=("x-mine",)
        )
    )
    with live.http() as http:
        asked = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "x-mine"}
        allowed = http.options("/v1/completions", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-credentials"] == "true"
        assert allowed.headers["access-control-allow-origin"] == origin
        for changed in (
            {"origin": "https://other.example.org"},
            {"access-control-request-method": "DELETE"},
            {"access-control-request-headers": "x-other"},
        ):
            assert http.options("/v1/completions", headers=asked | changed).status_code == 400


def test_an_unknown_host_is_told() -> None:
    with (
        pytest.raises(ConfigError, match=r"unknown host.* Try: rootgraft serve --host"),
        listening(ServerConfig(host="no.such.host.invalid")),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"Cannot assign requested address.*address of this machine"),
        listening(ServerConfig(host="203.0.113.1")),
    ):
        pass
