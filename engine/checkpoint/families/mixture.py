"""``Mixture``: the experts of a layer and how tokens are routed to them, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scores = Literal["softmax", "sigmoid"]
GatedActivation = Literal["silu", "gelu_tanh"]
Storage = Literal["modules", "stacked", "interleaved", "transposed"]
"""How a checkpoint stores experts.

modules: each expert's gate, up and down as matrices of their own.
stacked: one tensor [E, 2 I, H] of gate and up, and one [E, H, I] of down (Granite).
interleaved: one [E, H, 2 I] whose columns are gate and up by turns, and one [E, I, H], with biases (gpt-oss).
transposed: one [E, H, 2 I] whose columns are gate, then up, and one [E, I, H] (Llama 4, Qwen3-VL).
"""
TrainedAs = Literal["outputs first", "inputs first", "marked"]
"""[E, out, in]; [E, in, out]; the same in a module whose ``is_transposed`` is true."""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The activation ``g * sigmoid(alpha * g) * (u + 1)``, g at most ``limit``, u within ``-limit`` and ``limit``."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in a checkpoint, below the layer.

    Attributes:
        block: the module that router and experts are in.
        router: the router's module in the block.
        gate: an expert's module, or the tensor of all experts' gate and up; ``up`` and ``down`` likewise.
        storage: what ``gate``, ``up`` and ``down`` name.
        shared: the module of the shared expert.
        trained_as: how transformers stores the experts in memory, where adapters are trained: version 5, and version 4
            where that has stacked experts of another form.
        is_split: whatever the storage, this file has matrices of each expert (GGUF).
        shared_modules: its gate and up, or both in one, and down.
        correction: the correction of the router's scores in the block; None for the usual name, in the router.
        correction_is_row: it is stored as [1, E], not as [E].
        latent: the projections before and behind the experts, where they have a size of their own.
        shared_in_layer: it stands in the layer beside the block, not in the block.
    """

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    storage: Storage = "modules"
    shared: str = "shared_experts"
    trained_as: tuple[TrainedAs, ...] = ("outputs first",)
    is_split: bool = False
    shared_modules: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared_in_layer: bool = False
    correction: str | None = None
    correction_is_row: bool = False
    latent: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")

    @property
    def correction_name(self) -> str:
        """The tensor of the correction, below the block."""
        return self.correction or f"{self.router}.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class Mixture:
    """The MLP of a layer as a mixture of experts.

    The router's logits of a token become scores. The ``top_k`` experts of the highest scores, plus a correction where
    there is one, get the token, weighted by their scores.

    Attributes:
        num_experts: E.
        size: intermediate size of an expert, I.
        top_k: experts of a token.
        scores: softmax over all experts, or a sigmoid of each.
        renormalises: the weights of a token's experts are divided by their sum.
        scale: factor of the weights.
        corrected: the checkpoint has a correction for each expert.
        groups: number of groups of adjacent experts.
        top_groups: groups of which a token may choose, those with the largest ``best_of_group`` scores.
        shared_size: intermediate size of the expert that all tokens pass, 0 for none.
        gated_sharing: that expert is weighted by a sigmoid of the token.
        biased: router and experts have biases.
        clamp: the experts' activation; None for SiLU.
        weighs_input: the weights are factors of the experts' inputs, not of their results.
        gated: an expert is ``down(silu(gate(x)) * up(x))``, else ``down(relu(up(x)) ** 2)``, the shared one too.
        latent_size: width of the experts' inputs and results, where they stand between two projections (Nemotron 3).
        is_beside_mlp: it stands beside the layer's MLP, both behind norms of their own (Gemma 4). The router has a norm
            and a factor of each expert.
        activation: of experts with a gate, where there is no ``clamp``.
    """

    names: ExpertNames
    num_experts: int
    size: int
    top_k: int
    scores: Scores
    renormalises: bool
    scale: float = 1.0
    corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    shared_size: int = 0
    gated_sharing: bool = False
    biased: bool = False
    clamp: ClampedGate | None = None
    weighs_input: bool = False
    gated: bool = True
    latent_size: int | None = None
    is_beside_mlp: bool = False
    activation: GatedActivation = "silu"


@dataclass(frozen=True, slots=True)
class MixtureFamily:
    """How a family's ``config.json`` describes its mixtures.

    Attributes:
        names: in checkpoints.
        count_keys: of the number of experts, in older and in newer files.
        size_key: of an expert's intermediate size.
        top_k_key: of the number of a token's experts; its value may be a list of the same for each layer.
        dense_layers: which layers have an ordinary MLP: none, those that "mlp_only_layers" or "decoder_sparse_step"
            rule out, those before ``first_key``, those that "mlp_layer_types" calls dense or else the same, those
            but every n-th one, n = "expert_layer_period", from "expert_layer_offset" on, those outside of
            "moe_layer_start_index" and "moe_layer_end_index" or not an n-th one, n = "moe_layer_interval",
            or all that "moe_layers" does not list, which by default has every n-th one, n =
            "interleave_moe_layer_step".
        first_key: the key of the number of layers before the first mixture.
        scores: of the router.
        renormalises: whether weights are divided by their sum; None where "norm_topk_prob" says so.
        single_keeps_score: the weight of a token's only expert is its score, whatever ``renormalises`` says.
        scaled: honours "routed_scaling_factor".
        corrected: the checkpoint has a correction for each expert.
        corrected_key: the key that says whether it has; None where it always has.
        grouped: honours "n_group" and "topk_group".
        methods: values of "topk_method", the default first; with "greedy" there are no groups. Empty where the family
            has no such key.
        shared_size_key: of the shared expert's intermediate size, None for no shared expert.
        shared_count_key: of the number of shared experts, which together are one that is as many times as wide.
        gated_sharing: the shared expert has a weight for each token.
        biased: router and experts have biases.
        clamped: the activation is ``ClampedGate``, by "swiglu_alpha" and "swiglu_limit".
        gguf_renormalises: what "norm_topk_prob" would say in GGUF files, which have no key for it.
        mxfp4: experts may be stored in MXFP4.
        weighs_input: that of ``Mixture``.
        optional: without experts all layers have an ordinary MLP, of the shared expert's size.
        gated: that of ``Mixture``.
        latent_key: of its ``latent_size``, None where there is none.
        single_is_dense: one expert is an ordinary MLP.
        flag_key: of a flag without which there are no experts; None where their number says so.
        beside_mlp: ``is_beside_mlp`` of ``Mixture``.
        activation: that of ``Mixture``, asked for by "hidden_activation".
    """

    names: ExpertNames
    count_keys: tuple[str, ...]
    size_key: str = "moe_intermediate_size"
    top_k_key: str = "num_experts_per_tok"
    dense_layers: Literal["none", "stepped", "first", "typed", "spanned", "unlisted", "periodic"] = "none"
    first_key: str = "first_k_dense_replace"
    scores: Scores = "softmax"
    renormalises: bool | None = True
    single_keeps_score: bool = False
    scaled: bool = False
    corrected: bool = False
    corrected_key: str | None = None
    grouped: bool = False
    methods: tuple[str, ...] = ()
    shared_size_key: str | None = None
    shared_count_key: str | None = None
    gated_sharing: bool = False
    biased: bool = False
    clamped: bool = False
    gguf_renormalises: bool = False
    mxfp4: bool = False
    weighs_input: bool = False
    optional: bool = False
    gated: bool = True
    latent_key: str | None = None
    single_is_dense: bool = False
    flag_key: str | None = None
    beside_mlp: bool = False
    activation: GatedActivation = "silu"
