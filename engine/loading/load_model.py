"""Load a model: from a Hugging Face folder or a GGUF file to a ``DecoderModel`` on its device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...kernels.ops import AttentionParams, QuantisedLinear, RopeParams
from ..checkpoint.gguf import GgufFile
from ..checkpoint.model_config import ModelConfig, Rope
from ..checkpoint.read_config import open_checkpoint, read_model_config
from ..errors import ModelError
from ..models.decoder import DecoderModel
from ..models.layers import Attention, DecoderLayer, Mlp, Projection, RmsNorm
from ..models.rope import cos_sin_table
from .tensor_names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    check_tensors,
    expected_shapes,
    gate_up_modules,
    layer_norms,
    qkv_modules,
)
from .weight_forms import WeightForm, WeightReader
from .weight_readers import GgufWeights, RandomWeights, SafetensorsFolder, WeightSource


def load_model(
    checkpoint: Path | GgufFile,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None = None,
    dummy: bool = False,
    weights: WeightForm = "plain",
) -> DecoderModel:
    """Load a model from a folder in Hugging Face format or from a GGUF file.

    Args:
        checkpoint: the folder, or the file, opened or not.
        dtype: of weights and hidden states: float32, bfloat16 or float16.
        max_positions: longest sequence; the model's own maximum by default.
        dummy: use random weights in the model's shape; only its config is read.
        weights: the form of matrices in memory.

    Raises:
        ModelError: the model is not supported, or its files are malformed.
    """
    config = read_model_config(checkpoint)
    source = open_source(checkpoint, config, dummy)
    optional = frozenset({HEAD}) if config.tied_head else frozenset()
    check_tensors(expected_shapes(config), source.shapes, optional)
    if HEAD in source.shapes and config.tied_head:
        _check_tied(source)
    reader = WeightReader(source, dtype, device, weights)
    return _Assembly(config, reader, max_positions or config.max_position_embeddings).model()


def open_source(checkpoint: Path | GgufFile, config: ModelConfig, dummy: bool) -> WeightSource:
    """Open the weights of a model; see ``load_model``. Raises ModelError."""
    if dummy:
        return RandomWeights(config)
    found = open_checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    return GgufWeights(found, config) if isinstance(found, GgufFile) else SafetensorsFolder(found, config.towers)


def _check_tied(source: WeightSource) -> None:
    """Check that a stored head equals the embedding it is tied to: else it is undefined which of them counts."""
    head, embedding = (torch.empty(source.shapes[name]) for name in (HEAD, EMBEDDING))
    source.read(HEAD, head)
    source.read(EMBEDDING, embedding)
    if not torch.equal(head, embedding):
        raise ModelError(f"The config ties {HEAD} to {EMBEDDING}, but the checkpoint has different values for the two.")


class _Assembly:
    """Builds the decoder layer by layer, reading each tensor where it is needed."""

    def __init__(self, config: ModelConfig, weights: WeightReader, max_positions: int) -> None:
        self.config = config
        self.weights = weights
        self.max_positions = max_positions
        self.tables: dict[Rope, Tensor] = {}

    def model(self) -> DecoderModel:
        config = self.config
        embedding, head = self.embedding_and_head()
        norms = [self.norm(f"model.layers.{index}.input_layernorm.weight") for index in range(config.num_layers)]
        norms.append(self.norm(FINAL_NORM))
        return DecoderModel(
            config=config,
            embedding=embedding,
            # Rounded to the model's type as in Gemma's published code: 55.5, not 55.4256, in bfloat16.
            embedding_scale=torch.tensor(config.embedding_scale, dtype=self.weights.dtype).item(),
            first_norm=norms[0],
            layers=tuple(self.layer(index, norms[index + 1]) for index in range(config.num_layers)),
            head=head,
            max_positions=self.max_positions,
        )

    def layer(self, index: int, next_norm: RmsNorm) -> DecoderLayer:
        config = self.config
        prefix = f"model.layers.{index}"
        _, *inner = (f"{prefix}.{name}.weight" for name in layer_norms(config))
        if config.post_norms:
            post_attention, mlp_norm, post_mlp = (self.norm(name) for name in inner)
        else:
            post_attention, mlp_norm, post_mlp = None, self.norm(inner[0]), None
        return DecoderLayer(
            attention=self.attention(index, f"{prefix}.self_attn"),
            mlp=Mlp(
                gate_up=self.projection(f"{prefix}.mlp", gate_up_modules(config), config.mlp_bias),
                down=self.projection(f"{prefix}.mlp", {"down_proj": config.hidden_size}, config.mlp_bias),
                activation=config.activation,
            ),
            post_attention=post_attention,
            post_mlp=post_mlp,
            mlp_norm=mlp_norm,
            next_norm=next_norm,
        )

    def attention(self, index: int, prefix: str) -> Attention:
        config = self.config
        layer = config.layers[index]
        return Attention(
            qkv=self.projection(prefix, qkv_modules(config), config.qkv_bias),
            output=self.projection(prefix, {"o_proj": config.hidden_size}, config.output_bias),
            rope=RopeParams(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                cos_sin=self.table(layer.rope) if layer.rope else None,
                q_norm=self.weights.tensor(f"{prefix}.q_norm.weight") if config.qk_norm else None,
                k_norm=self.weights.tensor(f"{prefix}.k_norm.weight") if config.qk_norm else None,
                eps=config.norm_eps,
                offset=config.norm_offset,
            ),
            params=AttentionParams(config.attention_scale, layer.window, config.attention_soft_cap),
        )

    def embedding_and_head(self) -> tuple[Tensor | QuantisedLinear, Projection]:
        """Return the embedding, plain or quantised, and the head. A tied quantised head is the embedding itself."""
        size = self.config.vocab_size
        if not self.config.tied_head:
            return self.embedding(), self.projection("", {"lm_head": size}, bias=False)
        packed = self.weights.packed(EMBEDDING)
        embedding = packed if isinstance(packed, QuantisedLinear) else self.weights.tensor(EMBEDDING)
        return embedding, Projection(("lm_head",), (size,), packed)

    def embedding(self) -> Tensor | QuantisedLinear:
        return self.weights.stored(EMBEDDING) or self.weights.tensor(EMBEDDING)

    def projection(self, prefix: str, modules: dict[str, int], bias: bool) -> Projection:
        names = tuple(f"{prefix}.{module}".lstrip(".") for module in modules)
        bias_vector = self.weights.tensor(*(f"{name}.bias" for name in names)) if bias else None
        packed = self.weights.packed(*(f"{name}.weight" for name in names), bias=bias_vector)
        return Projection(names, tuple(modules.values()), packed)

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.weights.tensor(name), self.config.norm_eps, self.config.norm_offset)

    def table(self, rope: Rope) -> Tensor:
        if rope not in self.tables:
            self.tables[rope] = cos_sin_table(rope, self.max_positions, self.weights.device)
        return self.tables[rope]
