"""Listener: the listening socket of the server, which is a TCP port or, with ``--uds``, a Unix domain socket."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from ...engine.errors import ConfigError
from ..config import ServerConfig
from .descriptors import raise_limit


@dataclass(frozen=True, slots=True)
class Listener:
    """An open socket and its address.

    Attributes:
        url: address such as ``http://127.0.0.1:8000/prefix``, or ``unix:/run/rootgraft.sock``.
        place: the address in the form for log lines: host and port, or path.
        file: descriptor of the Unix domain socket's file; None for a TCP port.
    """

    socket: socket.socket
    url: str
    place: str
    file: int | None = None


@contextmanager
def listening(options: ServerConfig) -> Iterator[Listener]:
    """Context manager: open the listening socket of the options. On exit, the file of a Unix domain socket is removed.

    Also raises the process's limit of file descriptors to its hard limit.

    Raises:
        ConfigError: the port or the path is in use, or cannot be used.
    """
    raise_limit()
    if options.uds is not None:
        sock, file = _bind_path(options.uds)
        listener = Listener(sock, f"unix:{os.path.abspath(options.uds)}", options.uds, file)
        with sock:
            try:
                yield listener
            finally:
                remove_socket(listener)
                os.close(file)
        return
    with _bind_port(options) as sock:
        host, port = sock.getsockname()[:2]
        scheme = "http" if options.ssl_certfile is None else "https"
        shown = f"[{host}]" if ":" in host else host
        url = f"{scheme}://{shown}:{port}{options.root_path.rstrip('/')}"
        yield Listener(sock, url, f"{host}, port {port}")


@contextmanager
def private_socket() -> Iterator[tuple[socket.socket, str]]:
    """Context manager: open a Unix domain socket that only processes of this user can connect to.

    Yields it and its path.

    Raises:
        ConfigError: no folder is suitable for the socket.
    """
    with tempfile.TemporaryDirectory(prefix="rootgraft_main-") as folder, socket.socket(socket.AF_UNIX) as sock:
        path = os.path.join(folder, "main.sock")
        try:
            sock.bind(path)
        except OSError as error:
            raise ConfigError(
                f"--gateways needs a socket in {folder}: {error}. Try: TMPDIR=/tmp rootgraft serve"
            ) from error
        sock.listen(1)  # The server sets the actual backlog.
        yield sock, path


def remove_socket(listener: Listener) -> None:
    """Remove the file of this server's Unix domain socket, unless another server has replaced the file since."""
    if listener.file is not None:
        with suppress(OSError):
            if os.path.samestat(os.fstat(listener.file), os.lstat(listener.place)):
                os.unlink(listener.place)


def port_fault(options: ServerConfig) -> str:
    """Return the reason for which the port cannot be opened now, with a command that helps; "" if it can be opened."""
    try:
        _bind_port(options).close()
    except ConfigError as error:
        return str(error)
    return ""


def _bind_port(options: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((options.host, options.port))
        # This fails if another process listens on the port. The server sets the actual backlog.
        sock.listen(1)
    except OSError as error:
        sock.close()
        raise ConfigError(_fault_of_port(options, family, error)) from error
    return sock


def _fault_of_port(options: ServerConfig, family: socket.AddressFamily, error: OSError) -> str:
    host, port = options.host, options.port
    fault = f"Cannot listen on {host}, port {port}"
    if error.errno == errno.EADDRINUSE:
        return f"{fault}: in use{_holder(port)}. Try: rootgraft serve --port {_free_port(host, port, family)}"
    if error.errno == errno.EACCES:
        return f"{fault}: only root may open ports below 1024. Try: rootgraft serve --port 8000"
    reason = error.strerror if error.errno == errno.EADDRNOTAVAIL else "unknown host"
    return (
        f"{fault}: {reason}: --host must be an address of this machine. "
        f"Try: rootgraft serve --host 0.0.0.0 --port {port}"
    )


def _holder(port: int) -> str:
    """Return ``by NAME (pid N)`` for the process that listens on a port; "" if the system does not report it."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def _free_port(host: str, port: int, family: socket.AddressFamily) -> int:
    """Return the next free port. Without one, return 0, which stands for any port."""
    for candidate in range(port + 1, min(port + 50, 65536)):
        with socket.socket(family) as sock, suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, candidate))
            sock.listen(1)
            return candidate
    return 0


def _bind_path(path: str) -> tuple[socket.socket, int]:
    """Return a listening socket and a descriptor of its file.

    The descriptor keeps the inode number from being reused.
    """
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        # A socket file on which no process listens is left over from a server that was killed.
        sock.listen(1)
        file = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"--uds: cannot listen on {path}: {error.strerror or error}. Try: rootgraft serve --uds "
            f"{os.path.join(os.environ.get('XDG_RUNTIME_DIR') or '/tmp', 'rootgraft.sock')}"
        ) from error
    return sock, file


def _remove_stale(path: str) -> None:
    """Remove the socket file of a server that was killed.

    Raises ConfigError for a socket in use, and for other files.
    """
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return
    if not is_socket:
        raise ConfigError(f"--uds: {path} exists and is not a socket. Try: rootgraft serve --uds {path}.sock")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            # The queue of connections is full, so a server listens on this socket.
            pass
        except OSError as error:
            raise ConfigError(f"--uds: {path} cannot be used: {error.strerror}. Try: ls -l {path}") from error
    raise ConfigError(f"--uds: another process listens on {path}. Try: rootgraft ps, or rootgraft serve --uds {path}.2")
