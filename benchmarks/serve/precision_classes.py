"""The classes of the table: bfloat16, the same with adapters, 4 bits and 8 bits; each with our server and its peers.

=============  ==========================================  =================================================
class          rootgraft                                   peers
=============  ==========================================  =================================================
bf16           bfloat16 weights, activations and KV        vLLM in bfloat16; llama.cpp, GGUF of bfloat16
bf16-adapters  the same with eight adapters                the same with the same adapters
4bit           the Q4_1 file's blocks, activations of 8    llama.cpp, the same file (it rounds activations to
               bits, KV bfloat16; and in bfloat16, the     8 bits, KV fp16)
               default
8bit           8-bit weights and activations, 8-bit KV     llama.cpp, Q8_0 (activations of 8 bits, KV fp16);
                                                           OpenVINO, int8 weights, its default KV of 8 bits
=============  ==========================================  =================================================

"drafts off" is the same server without speculative decoding, which is on by default.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.serve.alternate import NO_DRAFTS, PrecisionClass, ServedForm
from benchmarks.serve.installed_peers import PEERS, Peer
from benchmarks.serve.load_run import Adapters
from benchmarks.serve.model_files import ModelForms, adapter_names
from benchmarks.serve.workloads import NAMES, WITH_ADAPTERS

OURS = f"{shlex.quote(sys.executable)} -P -m rootgraft.api.cli.main serve --port {{port}}"
_DRAFTS_OFF = """ --speculative-config '{{"method": "off"}}'"""
_WITHOUT_ADAPTERS = tuple(name for name in NAMES if name not in WITH_ADAPTERS)


class Installed(NamedTuple):
    """The peers, installed or not."""

    vllm: Peer
    llama: Peer
    openvino: Peer


def bfloat16(forms: ModelForms, peers: Installed) -> PrecisionClass:
    def ours() -> str:
        return f"{OURS} --model {_quoted(forms.bfloat16())} --dtype bfloat16"

    servers = (
        ServedForm("rootgraft", ours),
        ServedForm(NO_DRAFTS, lambda: ours() + _DRAFTS_OFF),
        ServedForm("vLLM", lambda: _vllm(forms, peers.vllm), is_peer=True),
        ServedForm("llama.cpp", lambda: _llama(forms, peers.llama, "BF16"), is_peer=True),
    )
    return PrecisionClass("bf16", "bfloat16", _WITHOUT_ADAPTERS, servers)


def bfloat16_adapters(forms: ModelForms, peers: Installed) -> PrecisionClass:
    names = adapter_names()

    def folders() -> str:
        return " ".join(_quoted(f"{name}={forms.adapters() / name}") for name in names)

    def ours() -> str:
        model = f"{OURS} --model {_quoted(forms.bfloat16())} --dtype bfloat16"
        return f"{model} --enable-lora --lora-modules {folders()}"

    def vllm() -> str:
        lora = f"--enable-lora --max-loras {len(names)} --max-lora-rank 64 --lora-modules {folders()}"
        return f"{_vllm(forms, peers.vllm)} {lora}"

    def llama() -> str:
        return _llama(forms, peers.llama, "BF16", [str(forms.adapters() / f"{name}.gguf") for name in names])

    by_name, by_number = Adapters(names), Adapters(names, by_number=True)
    servers = (
        ServedForm("rootgraft", ours, adapters=by_name),
        ServedForm("vLLM", vllm, adapters=by_name, is_peer=True),
        ServedForm("llama.cpp", llama, adapters=by_number, is_peer=True),
    )
    return PrecisionClass("bf16-adapters", "bfloat16, eight adapters", WITH_ADAPTERS, servers)


def four_bits(forms: ModelForms, peers: Installed) -> PrecisionClass:
    def ours() -> str:
        return f"{OURS} --model {_quoted(forms.gguf)}"

    servers = (
        ServedForm("rootgraft", lambda: f"{ours()} --quantization gguf_dynamic"),
        ServedForm(NO_DRAFTS, lambda: f"{ours()} --quantization gguf_dynamic{_DRAFTS_OFF}"),
        ServedForm("bfloat16 activations", ours),
        ServedForm("llama.cpp", lambda: _llama(forms, peers.llama, None), is_peer=True),
    )
    return PrecisionClass("4bit", "4 bits", _WITHOUT_ADAPTERS, servers)


def eight_bits(forms: ModelForms, peers: Installed) -> PrecisionClass:
    def ours() -> str:
        model = f"{OURS} --model {_quoted(forms.bfloat16())} --dtype bfloat16"
        return f"{model} --quantization int8_dynamic --kv-cache-dtype int8"

    def openvino() -> str:
        python = peers.openvino.program
        script = _quoted(PEERS / "openvino_server.py")
        return f"{_quoted(python)} {script} {_quoted(forms.openvino(python, 'int8'))} {{port}}"

    servers = (
        ServedForm("rootgraft", ours),
        ServedForm(NO_DRAFTS, lambda: ours() + _DRAFTS_OFF),
        ServedForm("llama.cpp", lambda: _llama(forms, peers.llama, "Q8_0"), is_peer=True),
        ServedForm("OpenVINO GenAI", openvino, is_peer=True),
    )
    return PrecisionClass("8bit", "8 bits", _WITHOUT_ADAPTERS, servers)


CLASSES: Mapping[str, Callable[[ModelForms, Installed], PrecisionClass]] = {
    "bf16": bfloat16,
    "bf16-adapters": bfloat16_adapters,
    "4bit": four_bits,
    "8bit": eight_bits,
}


def given(commands: Mapping[str, str]) -> PrecisionClass:
    """Return a class of servers by name, each a command with ``{port}`` or the address of one that runs."""
    servers = tuple(
        ServedForm(name, url=what, is_peer=number > 0)
        if what.startswith(("http://", "https://"))
        else ServedForm(name, partial(str, what), is_peer=number > 0)
        for number, (name, what) in enumerate(commands.items())
    )
    return PrecisionClass("given", "as given", NAMES, servers)


def _vllm(forms: ModelForms, peer: Peer) -> str:
    environment = f"env VLLM={_quoted(peer.program)} MODEL={_quoted(forms.bfloat16())}"
    return f"{environment} bash {_quoted(PEERS / 'vllm.sh')} {{port}} --dtype bfloat16"


def _llama(forms: ModelForms, peer: Peer, kind: str | None, adapters: Sequence[str] = ()) -> str:
    """Return the command for the GGUF file, or for one of another type."""
    quantize = peer.program.resolve().with_name("llama-quantize")
    model = forms.gguf if kind is None else forms.other_gguf(kind, quantize)
    lora = f" ADAPTERS={_quoted(','.join(adapters))}" if adapters else ""
    environment = f"env LLAMA_SERVER={_quoted(peer.program)} MODEL={_quoted(model)}{lora}"
    return f"{environment} bash {_quoted(PEERS / 'llama_cpp.sh')} {{port}}"


def _quoted(path: object) -> str:
    """Return a word of a command in which only ``{port}`` is filled in."""
    return shlex.quote(str(path)).replace("{", "{{").replace("}", "}}")
