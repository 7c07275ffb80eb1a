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
    """The activation ``g * sigmoid(alpha * g) * (u + offset)``, u within ``-limit`` and ``limit``.

    Attributes:
        gate_limit: the largest g; None for ``limit``.
    """

    alpha: float
    limit: float
    offset: float = 1.0
    gate_limit: float | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of modules and tensors of a mixture in a checkpoint, relative to the layer.

    Attributes:
        block: the module that contains router and experts.
        router: the router's module in the block.
        gate: module of an expert's gate, or the tensor of all experts' gate and up; ``up`` and ``down`` likewise.
        storage: what the names ``gate``, ``up`` and ``down`` refer to.
        shared: the module of the shared expert.
        trained_as: the forms in which transformers stores the experts in memory when adapters are trained: the form of
            version 5, and the form of version 4 if that stacks experts in another way.
        is_split: whether this file has separate matrices for each expert (GGUF), regardless of ``storage``.
        shared_modules: the shared expert's gate and up, or the one module for both, and its down.
        correction: name in the block of the correction of the router's scores; None for the usual name, in the router.
        correction_is_row: whether the correction is stored as [1, E], not as [E].
        latent: the projections before and after the experts, for experts with a width of their own.
        shared_in_layer: whether the shared expert is in the layer, next to the block, and not in the block.
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
        """Name of the correction's tensor, relative to the block."""
        return self.correction or f"{self.router}.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class Mixture:
    """The MLP of a layer as a mixture of experts.

    Scores are computed from the router's logits. A token is sent to the ``top_k`` experts with the highest scores
    (after adding a correction, if there is one), and their results are weighted by the scores.

    Attributes:
        num_experts: E.
        size: intermediate size of an expert, I.
        top_k: number of experts of a token.
        scores: function that turns logits into scores: a softmax over all experts, or a sigmoid of each logit.
        renormalises: whether the weights of a token's experts are divided by their sum.
        scale: factor of the weights.
        corrected: whether the checkpoint has a correction for each expert.
        groups: number of groups of adjacent experts.
        top_groups: number of groups from which a token may choose experts: those with the largest ``best_of_group``
            scores.
        shared_size: intermediate size of the expert that all tokens pass, 0 for none.
        gated_sharing: whether the shared expert is weighted by a sigmoid of the token.
        biased: whether router and experts have biases.
        clamp: the experts' activation; None for SiLU.
        shared_clamp: the shared expert's activation; None for SiLU.
        weighs_input: whether the weights are factors of the experts' inputs, not of their results.
        gated: whether an expert is ``down(silu(gate(x)) * up(x))``, else ``down(relu(up(x)) ** 2)``; the same for the
            shared expert.
        latent_size: width of the experts' inputs and results, if the experts are between two projections (Nemotron 3).
        is_beside_mlp: whether the mixture is beside the layer's MLP, each followed by a norm of its own (Gemma 4). The
            router then has a norm and a factor for each expert.
        activation: activation of experts with a gate, unless ``clamp`` is set.
        shared_scale: factor of the shared expert's result.
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
    shared_clamp: ClampedGate | None = None
    weighs_input: bool = False
    gated: bool = True
    latent_size: int | None = None
    is_beside_mlp: bool = False
    activation: GatedActivation = "silu"
    shared_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MixtureFamily:
    """How a family's ``config.json`` describes its mixtures.

    Attributes:
        names: names in checkpoints.
        count_keys: keys of the number of experts, in older and in newer files.
        size_key: key of an expert's intermediate size.
        top_k_key: key of the number of a token's experts; its value may be a list of the same number for each layer.
        dense_layers: rule for which layers have an ordinary MLP. "none": no layer. "stepped": the layers that
            "mlp_only_layers" or "decoder_sparse_step" rule out. "first": the layers before ``first_key``. "typed": the
            layers that "mlp_layer_types" calls dense, else as "first". "periodic": all but every n-th layer from
            "expert_layer_offset" on, n = "expert_layer_period". "spanned": layers outside of "moe_layer_start_index" to
            "moe_layer_end_index", and layers that are not an n-th one, n = "moe_layer_interval". "unlisted": the layers
            that "moe_layers" does not list; by default it lists every n-th layer, n = "interleave_moe_layer_step".
        first_key: the key of the number of layers before the first mixture.
        flags_key: the key of a list with 1 for each layer with a mixture and 0 for the others, if it is a list.
        scores: score function of the router.
        scores_key: the key of the score function; None if it is always ``scores``. Softmax scores are then renormalised
            whatever the config says.
        renormalises: whether weights are divided by their sum; None if "norm_topk_prob" decides.
        single_keeps_score: whether the weight of a token's only expert is its score, regardless of ``renormalises``.
        scaled: whether the family honours "routed_scaling_factor".
        corrected: whether the checkpoint has a correction for each expert.
        may_lack_correction: whether a checkpoint without the correction has one of zeros.
        corrected_key: the key that says whether the checkpoint has a correction; None if it always has one.
        grouped: whether the family honours "n_group" and "topk_group".
        methods: values of "topk_method", the default first; with "greedy" there are no groups. Empty if the family has
            no such key.
        shared_size_key: key of the shared expert's intermediate size, None for no shared expert.
        shared_count_key: key of the number of shared experts, which together form one expert of that many times the
            width.
        gated_sharing: whether the shared expert has a weight for each token.
        biased: whether router and experts have biases.
        clamped: whether the activation is ``ClampedGate``, with "swiglu_alpha" and "swiglu_limit".
        limited: whether layers bound their activations, by "swiglu_limits" in experts and by "swiglu_limits_shared" in
            the shared one and in ordinary MLPs.
        gguf_renormalises: the value of "norm_topk_prob" for GGUF files, which have no key for it.
        mxfp4: whether experts may be stored in MXFP4.
        weighs_input: ``weighs_input`` of ``Mixture``.
        optional: whether a config may have no experts; then all layers have an ordinary MLP of the shared expert's
            size.
        gated: ``gated`` of ``Mixture``.
        latent_key: key of ``latent_size`` of ``Mixture``; None if the experts have no width of their own.
        single_is_dense: whether a mixture of a single expert is an ordinary MLP.
        flag_key: key of a flag that turns experts on; None if the number of experts decides.
        beside_mlp: ``is_beside_mlp`` of ``Mixture``.
        activation: ``activation`` of ``Mixture``, selected by "hidden_activation".
        sharing_key: the key that says whether the results of the chosen experts and of the shared one are added ("sum")
            or averaged ("average"); None if they are added.
    """

    names: ExpertNames
    count_keys: tuple[str, ...]
    size_key: str = "moe_intermediate_size"
    top_k_key: str = "num_experts_per_tok"
    dense_layers: Literal["none", "stepped", "first", "typed", "spanned", "unlisted", "periodic"] = "none"
    first_key: str = "first_k_dense_replace"
    flags_key: str | None = None
    scores: Scores = "softmax"
    scores_key: str | None = None
    renormalises: bool | None = True
    single_keeps_score: bool = False
    scaled: bool = False
    corrected: bool = False
    corrected_key: str | None = None
    may_lack_correction: bool = False
    grouped: bool = False
    methods: tuple[str, ...] = ()
    shared_size_key: str | None = None
    shared_count_key: str | None = None
    gated_sharing: bool = False
    biased: bool = False
    clamped: bool = False
    limited: bool = False
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
    sharing_key: str | None = None
