"""The language model of Step 3.5 as a causal model, which transformers has only inside of the multimodal class."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, Step3p7PreTrainedModel, Step3p7TextConfig, Step3p7TextModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """The text model with a head."""

    config_class = Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **options: object) -> CausalLMOutputWithPast:
        """[B, T] -> logits [B, T, V]."""
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, **options).last_hidden_state))


def published_step(text: dict[str, Any]) -> dict[str, Any]:
    """Return the config of Step's language model with the keys of the published files, which list MTP modules too."""
    kinds, mlps = text.pop("layer_types"), text.pop("mlp_layer_types")
    ropes = [text["rope_parameters"][kind] for kind in kinds]
    names = {
        "num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
    }  # fmt: skip
    own = {"num_attention_heads": text.pop("num_sliding_attention_heads"), "head_dim": text["head_dim"]}
    dropped = ("rope_parameters", "per_layer_config", "query_pre_attn_scalar", "mtp_layer_types")
    limits = {key: [*text.pop(key), 0.0] for key in ("swiglu_limits", "swiglu_limits_shared")}
    scaling = {key: value for key, value in ropes[0].items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {
        **({} if scaling["rope_type"] == "default" else {"rope_scaling": scaling}),
        **{names.get(key, key): value for key, value in text.items() if key not in dropped},
        **limits,
        "num_nextn_predict_layers": 1,
        "layer_types": [*kinds, "sliding_attention"],
        "moe_layers_enum": ",".join(str(index) for index, kind in enumerate(mlps) if kind == "sparse"),
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_groups": 2, **own},
        "rope_theta": [*(each["rope_theta"] for each in ropes), 100.0],
        "partial_rotary_factors": [*(each.get("partial_rotary_factor", 1.0) for each in ropes), 1.0],
        "yarn_only_types": ["full_attention"],
        "use_rope_layers": [],
        "use_head_wise_attn_gate": True,
        "zero_centered": True,
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": True,
        "use_moe_router_bias": True,
        "sink": False,
    }
