"""Progress bar of ``generate`` and ``chat``."""

from __future__ import annotations

import time

from tqdm import tqdm

_SHOW_EVERY = 0.5  # seconds between updates of the speed


class ProgressBar:
    """Progress bar: finished answers, and tokens per second over all of them."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar = tqdm(total=total, disable=not shown, unit="answer", desc="Generating", dynamic_ncols=True)
        self._started = self._last = time.monotonic()
        self._tokens = 0

    def update(self, num_ended: int, num_tokens: int) -> None:
        """Show the number of finished answers, and from time to time the speed."""
        self._tokens = num_tokens
        if num_ended > self._bar.n:
            self._bar.update(num_ended - self._bar.n)
        now = time.monotonic()
        if now - self._last >= _SHOW_EVERY:
            self._show(now)

    def close(self) -> None:
        self._show(time.monotonic())
        self._bar.close()

    def _show(self, now: float) -> None:
        self._last = now
        self._bar.set_postfix_str(f"{self._tokens / max(now - self._started, 1e-9):.1f} tokens/s")
