"""TLS: creates the server's TLS context from the certificate files, tests it by a handshake, and renews it."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from pathlib import Path

from ...engine.errors import ConfigError
from ..config import ServerConfig

REFRESH_SECONDS = 5.0
_WARN_SECONDS = 14 * 86400

logger = logging.getLogger("rootgraft.server")


class RenewableContext(ssl.SSLContext):
    """TLS context of a server. New connections use the context that was loaded last.

    Each load creates a new context, because certificates of authorities cannot be removed from a context. Besides,
    session tickets of the old context would resume sessions without another check of the client's certificate.
    """

    loaded: ssl.SSLContext

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Start a connection with the context that was loaded last."""
        return self.loaded.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


def tls_context(options: ServerConfig) -> RenewableContext | None:
    """Create the TLS context for the options. Returns None without ``--ssl-certfile``.

    Raises:
        ConfigError: a file cannot be read or used, key and certificate differ, or clients would refuse the certificate.
    """
    if options.ssl_certfile is None:
        return None
    context = RenewableContext(ssl.PROTOCOL_TLS_SERVER)
    context.loaded = _loaded(options, options.ssl_certfile)
    return context


async def refresh_certificates(context: RenewableContext, options: ServerConfig) -> None:
    """Reload the certificate files whenever they change, for new connections, until the task is cancelled.

    If the files cannot be used, the error is logged, the previous files stay in use, and loading is tried again.
    """
    seen, told = _versions(options), ""
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        if (now := _versions(options)) == seen:
            continue
        try:
            renewed = tls_context(options)
            assert renewed is not None
        except (ConfigError, OSError) as error:
            if str(error) != told:
                told = str(error)
                logger.error("the certificate was not reloaded: %s", told)
        else:
            context.loaded, seen, told = renewed.loaded, now, ""
            logger.info("reloaded the certificate of %s", options.ssl_certfile)


def _loaded(options: ServerConfig, certfile: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    if options.ssl_ciphers is not None:
        try:
            context.set_ciphers(options.ssl_ciphers)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--ssl-ciphers: OpenSSL has none of the ciphers in {options.ssl_ciphers}. Try: openssl ciphers -v"
            ) from error
    _load_files(context, options)
    _check_by_handshake(context, certfile)
    return context


def _files(options: ServerConfig) -> dict[str, str]:
    """Return the paths of the files that the options name, by flag."""
    named = {
        "--ssl-certfile": options.ssl_certfile,
        "--ssl-keyfile": options.ssl_keyfile,
        "--ssl-ca-certs": options.ssl_ca_certs,
    }
    return {flag: name for flag, name in named.items() if name is not None}


def _versions(options: ServerConfig) -> list[tuple[int, int, int] | None]:
    found: list[tuple[int, int, int] | None] = []
    for name in _files(options).values():
        try:
            status = os.stat(name)
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return found


def _load_files(context: ssl.SSLContext, options: ServerConfig) -> None:
    for flag, name in _files(options).items():
        try:
            with Path(name).open("rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{flag}: {name} cannot be read: {error.strerror}. Try: ls -l {name}") from error
    certfile = str(options.ssl_certfile)
    try:
        context.load_cert_chain(certfile, options.ssl_keyfile, password=_no_passphrase)
    except _NeedsPassphrase as error:
        key = options.ssl_keyfile or certfile
        raise ConfigError(
            f"--ssl-keyfile: {key} is locked with a passphrase. Try: openssl pkey -in {key} -out unlocked.key"
        ) from error
    except ssl.SSLError as error:
        raise ConfigError(_fault_of_pair(error, certfile, options.ssl_keyfile)) from error
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except ssl.SSLError as error:
            name = options.ssl_ca_certs
            raise ConfigError(
                f"--ssl-ca-certs: {name} contains no PEM certificate. Try: openssl x509 -in {name} -noout -subject"
            ) from error


class _NeedsPassphrase(Exception):
    """Raised if the key file is encrypted."""


def _no_passphrase() -> str:
    """Raise an exception instead of letting OpenSSL ask for a passphrase at the terminal."""
    raise _NeedsPassphrase


def _fault_of_pair(error: ssl.SSLError, certfile: str, keyfile: str | None) -> str:
    if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
        return (
            f"--ssl-keyfile: the key in {keyfile or certfile} does not match the certificate {certfile}: their "
            f"public keys differ. Try: openssl x509 -in {certfile} -noout -pubkey"
        )
    if "-----BEGIN CERTIFICATE" not in Path(certfile).read_text("utf-8", "replace"):
        return (
            f"--ssl-certfile: {certfile} contains no PEM certificate. Try: openssl x509 -inform der -in {certfile} "
            "-out certificate.pem"
        )
    if keyfile is None:
        return f"--ssl-certfile: {certfile} contains no private key: give its file with --ssl-keyfile."
    return (
        f"--ssl-keyfile: {keyfile} contains no PEM private key that OpenSSL can read. Try: openssl pkey -in "
        f"{keyfile} -noout -text"
    )


def _check_by_handshake(context: ssl.SSLContext, certfile: str) -> None:
    """Perform a TLS handshake in memory with a client that trusts only this certificate and checks its dates and
    purpose.

    Raises:
        ConfigError: the client refuses the certificate, for example because it has expired.
    """
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_context.load_verify_locations(certfile)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        if not any([_shaken(client), _shaken(server), _shaken(client)]):
            raise ConfigError(f"--ssl-certfile: no client can connect with {certfile} and these ciphers.")
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"--ssl-certfile: clients will refuse {certfile}: {error.verify_message}. Renew it; its dates: "
            f"openssl x509 -in {certfile} -noout -dates"
        ) from error
    except ssl.SSLError as error:
        raise ConfigError(f"--ssl-certfile: no client can connect with {certfile}: {error.reason}.") from error
    certificate = client.getpeercert() or {}
    left = ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()
    if left < _WARN_SECONDS:
        logger.warning("--ssl-certfile: %s expires in %.0f days; renew it", certfile, left / 86400)


def _shaken(side: ssl.SSLObject) -> bool:
    """Continue a handshake as far as the available bytes allow. Returns whether this side has finished."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
