"""``PoolPages``: the pages of a worker's KV pool as those see them that keep KV elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ...kernels import ops
from ...kernels.layouts import kv_forms
from ..batch import Batch, PageLoad, StateLoad
from ..config import EngineConfig
from ..models.decoder import DecoderModel
from ..models.kv_pool import KvPool, KvPrefault
from ..models.model import Model


class PoolPages:
    """Reads pages and recurrent states of a KV pool (``kv_cache.make_tiers.KvPages``).

    Stored pages are used again only in a pool with the same ``form``. KV also depends on how its numbers are computed,
    so the form names the arithmetic in addition to the layout. It does not name the form of weights that was measured
    to be the fastest at the start, because all forms among which the measurement chooses give the same numbers.

    Attributes:
        form, page_bytes, state_bytes, refusal, on_device: see ``KvPages``.
    """

    def __init__(self, config: EngineConfig, model: Model, kv: KvPool) -> None:
        self._kv = kv
        self._prefault: KvPrefault | None = None
        self.on_device = model.device.type != "cpu"
        self.form = f"{kv.form}{_static_scales(model, kv)}; {_arithmetic(config, model)}"
        self.page_bytes, self.state_bytes = kv.page_bytes, kv.state_bytes
        self.refusal = _refusal(config, kv)

    def populate_ahead(self) -> None:
        """On a CPU, begin to allocate the memory of pages before they are used."""
        if not self.on_device:
            self._prefault = KvPrefault(self._kv)

    def reach(self, batch: Batch) -> None:
        """Note the pages that a step is about to write."""
        if self._prefault is not None:
            self._prefault.reach(batch)

    def read_page(self, page: int) -> memoryview:
        """Return a copy of a page's bytes, on any thread."""
        return self._kv.read_page(page)

    def read_state(self, slot: int) -> memoryview:
        """Return a copy of a recurrent state's bytes, on any thread."""
        return self._kv.read_state(slot)

    def load(self, loads: Sequence[PageLoad | StateLoad]) -> None:
        """Fill pages and slots that no step in flight uses, between two steps."""
        self._kv.copy(loads)


def _refusal(config: EngineConfig, kv: KvPool) -> str:
    if kv.hidden is not None:
        return "its draft head reads hidden states beside the KV; use another --speculative-config"
    return ""


def _static_scales(model: Model, kv: KvPool) -> str:
    """Return a name for the static scales of the pool's KV, so that KV with other scales gets another form.

    The digest of the weights does not suffice: two checkpoints may have the same weights and different scales.
    """
    scales = model.kv_scales if isinstance(model, DecoderModel) else None
    used = {index: each for index, each in (scales or {}).items() if kv_forms.takes_static(kv.dtype, each.form)}
    if not used:
        return ""
    numbers = b"".join(
        index.to_bytes(4, "little") + used[index].values.cpu().numpy().tobytes() for index in sorted(used)
    )
    return f" static scales {hashlib.sha256(numbers).hexdigest()[:16]}"


def _arithmetic(config: EngineConfig, model: Model) -> str:
    """Return a text with everything except weights on which the numbers of the KV depend."""
    kernels = ops.native_kernels() if model.device.type == "cpu" else None
    instructions = kernels.library.instruction_set if kernels is not None else "plain"
    dtype = str(model.dtype).removeprefix("torch.")
    weights = config.quantization or "as stored"
    return f"{type(model).__name__} {dtype} on {model.device.type} {instructions}, weights {weights}"
