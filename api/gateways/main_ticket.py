"""Main ticket: what the main process holds for a request of a gateway that it has admitted, and knows of its use."""

from __future__ import annotations

from ..access.request_admission import Demand, QueueTicket


class MainTicket:
    """Holds a ticket for a gateway, and counts as its request goes on.

    Args:
        ticket: places in the queue, and tokens of the key.
        demand: of the request.
        key: its name.
        model: that its usage counts under.
        adapter: None for the base model.

    Attributes:
        num_generated: tokens of the answers, as far as the gateway has told.
    """

    def __init__(self, ticket: QueueTicket, demand: Demand, key: str, model: str, adapter: str | None) -> None:
        self._ticket = ticket
        self._demand = demand
        self._begun: list[tuple[int, int]] = []
        self.key, self.model, self.adapter = key, model, adapter
        self.num_generated = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts that have begun to be answered, each counted once."""
        return sum(self._demand.prompts[prompt][0] for prompt in {prompt for prompt, _ in self._begun})

    def begin(self, sequence: tuple[int, int], num_tokens: int) -> None:
        """Take the first tokens of a sequence (prompt, index), or its end without any."""
        self._begun.append(sequence)
        self.num_generated += num_tokens
        self._ticket.take(sequence, num_tokens)

    def add(self, num_tokens: int) -> None:
        """Count further tokens of a request that has begun."""
        if self._begun:
            self.num_generated += num_tokens
            self._ticket.take(self._begun[0], num_tokens)

    def end(self, num_tokens: int) -> None:
        """Count the last tokens and give back what the request holds."""
        self.add(num_tokens)
        self._ticket.close()
