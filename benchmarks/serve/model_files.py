"""The default model in the forms that servers read, made once: bfloat16 for Hugging Face's readers, GGUF files of other
types, OpenVINO's format; and eight adapters. All come from the one GGUF file, so that all servers have its weights.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.serve.alternate import Unavailable
from benchmarks.serve.make_adapters import RANKS, write_adapters
from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.checkpoint.gguf_config import gguf_model_config
from rootgraft.engine.loading.weight_readers import GgufWeights
from rootgraft.engine.text.tokenizer_gguf import read_gguf

SECONDS = 1800.0  # Longest time of a program that converts a model.


class ModelForms:
    """The forms of one GGUF file in a folder; each is made when it is first asked for.

    Args:
        gguf: the file, with blocks of 4 bits.
        folder: where the forms are kept.
    """

    def __init__(self, gguf: Path, folder: Path) -> None:
        self.gguf = gguf
        self._folder = folder

    def bfloat16(self) -> Path:
        """Return the folder in Hugging Face format, its tokens those of the GGUF file. Raises Unavailable."""
        return self._made("bfloat16", self._write_bfloat16)

    def other_gguf(self, kind: str, quantize: Path) -> Path:
        """Return a GGUF file whose matrices are of another type ("BF16", "Q8_0").

        Args:
            quantize: llama.cpp's ``llama-quantize``.

        Raises:
            Unavailable: there is no such program, or it fails.
        """
        return self._made(
            f"{kind}.gguf",
            lambda path: _run([str(quantize), "--allow-requantize", str(self.gguf), str(path), kind]),
        )

    def openvino(self, python: Path, weights: str) -> Path:
        """Return the folder for OpenVINO with weights of a format ("int8", "fp16").

        Args:
            python: of an environment with ``optimum-cli``.

        Raises:
            Unavailable: there is no ``optimum-cli``, or it fails.
        """
        export = [str(python.with_name("optimum-cli")), "export", "openvino", "-m", str(self.bfloat16())]
        task = ["--task", "text-generation-with-past", "--weight-format", weights]
        return self._made(f"openvino-{weights}", lambda path: _run([*export, *task, str(path)]))

    def adapters(self) -> Path:
        """Return the folder of the adapters ``a0`` to ``a7``, and of each as a GGUF file."""
        return self._made("adapters", write_adapters)

    def _made(self, name: str, write: Callable[[Path], object]) -> Path:
        """Return a path below the folder, which gets its name once it is whole."""
        path = self._folder / name
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._folder / f"unfinished-{name}"
            _remove(unfinished)
            write(unfinished)
            unfinished.rename(path)
        return path

    def _write_bfloat16(self, folder: Path) -> None:
        write_bfloat16(self.gguf, folder)
        tokenizer = read_gguf(self.gguf)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer.definition))
        [template] = tokenizer.chat_templates.values()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **tokenizer.special}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_bfloat16(gguf: Path, folder: Path) -> None:
    """Write weights and config of a Llama in a GGUF file as a folder in Hugging Face format. Raises Unavailable."""
    file = GgufFile.open(gguf)
    config = gguf_model_config(file)
    rope = config.layers[0].rope
    if config.family != "llama" or rope is None or rope.scaling is not None:
        raise Unavailable(f"{gguf.name} is not a plain Llama: only plain Llamas get a bfloat16 copy")
    source = GgufWeights(file, config)
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in source.shapes.items()}
    for name, tensor in tensors.items():
        source.read(name, tensor)
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope.theta,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields))
    ends = {key: fields[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def adapter_names() -> tuple[str, ...]:
    return tuple(f"a{number}" for number in range(len(RANKS)))


def _run(command: list[str]) -> None:
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} was not found") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{name} did not end within {SECONDS:.0f} s") from error
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["it wrote nothing"]
        raise Unavailable(f"{name} failed: {lines[-1][:300]}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
