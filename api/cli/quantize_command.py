"""``rootgraft quantize``: writes a quantised copy of a model's folder, with a progress bar in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

from ...engine.errors import ConfigError
from .options import QuantizeOptions


def quantize(options: QuantizeOptions) -> int:
    """Quantise a model and print the path and size of the copy. Returns 0."""
    from tqdm import tqdm

    from ...engine.checkpoint.locate import resolve_model
    from ...engine.model_tools.quantize_folder import Scheme, quantize_folder

    files = resolve_model(options.model, on_machine=True)
    if not files.path.is_dir():
        raise ConfigError(f"--model: {options.model} is a GGUF file: its weights are already quantised.")

    out = Path(options.output).expanduser()
    with tqdm(desc="Quantising", unit="tensor", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = quantize_folder(files.path, out, cast(Scheme, options.scheme), progress)
    share = found.bytes_after / max(1, found.bytes_before)
    print(
        f"{out}: {found.modules} linear modules in {options.scheme}, {found.bytes_after / 1e6:,.0f} MB "
        f"({share:.0%} of {found.bytes_before / 1e6:,.0f})"
    )
    return 0
