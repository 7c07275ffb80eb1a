"""Forms of a model: the file that holds it, and how our server and a peer serve it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.big_models.model_shapes import SHAPES
from benchmarks.big_models.write_checkpoint import write_folder, write_gguf


@dataclass(frozen=True, slots=True)
class ModelForm:
    """A form of weights.

    Attributes:
        file: "folder" for one in Hugging Face format, or a kind of GGUF file.
        quantization: as ``--quantization`` takes it.
        kv: as ``--kv-cache-dtype`` takes it.
    """

    file: str
    quantization: str | None = None
    kv: str = "auto"


FORMS = {
    "bf16": ModelForm("folder"),
    "int8": ModelForm("Q8_0", "int8_dynamic"),
    "int8-kv": ModelForm("Q8_0", "int8_dynamic", "int8"),
    "q8_0": ModelForm("Q8_0", "gguf_dynamic"),
    "q4_0-widened": ModelForm("Q4_0"),  # as the measured rule chooses
    "q4_0": ModelForm("Q4_0", "gguf"),
    "q4_0-dynamic": ModelForm("Q4_0", "gguf_dynamic"),
    "q4_1-dynamic": ModelForm("Q4_1", "gguf_dynamic"),
    "q4_k_m": ModelForm("Q4_K_M", "gguf"),
    "q4_k_m-dynamic": ModelForm("Q4_K_M", "gguf_dynamic"),
}


def make_file(folder: Path, model: str, file: str) -> Path:
    """Return the path of a model's file, which is written if it is not there.

    Args:
        folder: for all models' files.
        model: a name in ``SHAPES``.
        file: "folder" or a kind of GGUF file.
    """
    path = folder / (model if file == "folder" else f"{model}-{file}.gguf")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"unfinished-{path.name}")
        remove_file(unfinished)
        if file == "folder":
            write_folder(unfinished, SHAPES[model])
        else:
            write_gguf(unfinished, SHAPES[model], file)
        unfinished.rename(path)
    return path


def remove_file(path: Path) -> None:
    """Remove a model's file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
