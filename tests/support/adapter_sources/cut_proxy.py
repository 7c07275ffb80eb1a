"""A TCP proxy that passes on only so many bytes of a server's answers, and then none."""

from __future__ import annotations

import contextlib
import socket
import threading


class CutProxy:
    """Listens at ``port`` until ``close``.

    Attributes:
        budget: bytes of answers that are still passed on.
        sent: what clients have sent.
    """

    def __init__(self, target: tuple[str, int], budget: int) -> None:
        self.budget = budget
        self.sent = bytearray()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._target)
                for source, target, is_answer in ((client, server, False), (server, client, True)):
                    self._threads.append(
                        threading.Thread(target=self._pass, args=(source, target, is_answer), daemon=True)
                    )
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(16_384):
                if is_answer:
                    data = data[: self.budget]
                    self.budget -= len(data)
                    if not data:
                        break
                else:
                    self.sent += data
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
            source.shutdown(socket.SHUT_RDWR)
