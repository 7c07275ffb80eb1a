"""``rootgraft pull``: downloads a model to this machine, with a progress bar."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from .options import PullOptions

if TYPE_CHECKING:
    from tqdm import tqdm

    from ...engine.checkpoint.locate import ModelFiles


def pull(options: PullOptions) -> int:
    """Download a model if it is not cached, and print its folder. Returns 0."""
    print(fetch_model(options.model, options.revision).path)
    return 0


def fetch_model(model: str | None, revision: str | None) -> ModelFiles:
    """Download a model if it is not cached. A terminal shows a progress bar, and a log gets a line for each file.

    Raises:
        ModelError: there is no such model, or it cannot be downloaded.
    """
    from tqdm import tqdm

    from ...engine.checkpoint.locate import resolve_model

    bars: dict[str, tqdm] = {}
    in_terminal = sys.stderr.isatty()

    def progress(file: str, done: int, total: int) -> None:
        if file not in bars:
            if not in_terminal:
                print(f"{file} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)
            bars[file] = tqdm(
                desc=file,
                total=total,
                unit="B",
                unit_scale=True,
                disable=not in_terminal,
                ncols=min(shutil.get_terminal_size().columns, 110),
                bar_format="{desc}  {percentage:3.0f}% {bar} {n_fmt}/{total_fmt}B  {rate_fmt}",
            )
        bars[file].update(done - bars[file].n)

    try:
        return resolve_model(model, revision=revision, progress=progress)
    finally:
        for bar in bars.values():
            bar.close()
