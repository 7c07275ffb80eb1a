"""Gateway ticket: what a request of this gateway holds of queue and rate limits, which the main process keeps."""

from __future__ import annotations

from collections.abc import Callable

from .gateway_client import GatewayClient


class GatewayTicket:
    """A ticket of the main process's ``RequestAdmission``, by its number.

    Args:
        number: unique in this gateway.
        ended: called when it is closed.

    Attributes:
        num_generated: tokens of the answers so far.
        num_told: those of them that the main process knows of.
    """

    def __init__(self, client: GatewayClient, number: int, ended: Callable[[GatewayTicket], None]) -> None:
        self._client = client
        self._ended = ended
        self._begun: set[tuple[int, int]] = set()
        self.number = number
        self.num_generated = 0
        self.num_told = 0

    def take(self, sequence: tuple[int, int], num_tokens: int) -> None:
        """Count tokens of a sequence; the main process is told of its first ones at once."""
        self.num_generated += num_tokens
        if sequence not in self._begun:
            self._begun.add(sequence)
            self._client.tell("begun", self.number, *sequence, self.news())

    def close(self) -> None:
        """Give back what it holds."""
        self._ended(self)
        self._client.tell("ended", self.number, self.news())

    def news(self) -> int:
        """Return the tokens that the main process has not been told of, and count them as told."""
        count = self.num_generated - self.num_told
        self.num_told = self.num_generated
        return count
