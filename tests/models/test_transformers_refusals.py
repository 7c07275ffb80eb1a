"""What is refused by name where the transformers library computes, and which implementation computes what."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models.library_models import save_library_model
from support.models.paged_run import CPU
from support.models.tiny_llama import TinyLlama  # noqa: F401

from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ModelError, UnknownArchitecture
from rootgraft.engine.loading.model_impl import load_by
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.model import Model
from rootgraft.engine.models.transformers.load_transformers_model import load_transformers_model
from rootgraft.engine.models.transformers.transformers_model import TransformersModel
