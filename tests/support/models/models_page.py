# ruff: noqa: E501 (paragraphs of the page)
"""Writes the documentation's page on models from the tables of families.

PYTHONPATH=tests python tests/support/models/models_page.py > docs/reference/models.md
"""

from __future__ import annotations

from rootgraft.engine.checkpoint.families.family import Family
from rootgraft.engine.checkpoint.families.family_table import BY_GGUF_NAME, FAMILIES
from rootgraft.engine.checkpoint.families.library_classes import LIBRARY_CLASSES, LIBRARY_WRAPPERS
from rootgraft.engine.checkpoint.families.mixture import MixtureFamily
from rootgraft.engine.checkpoint.gguf import TENSOR_TYPES
from rootgraft.engine.checkpoint.published_models import (
    FORMS,
    GGUF_OF_WHOLE,
    form_answers,
    published_models,
)
from rootgraft.engine.checkpoint.rope_config import ROPE_TYPES
from rootgraft.engine.checkpoint.text_config import MULTIMODAL, Multimodal
from support.models.forms_table import forms_table

_INTRODUCTION = """# What loads

This page is written from the tables that the engine loads models by: `PYTHONPATH=tests python tests/support/models/models_page.py > docs/reference/models.md`. A test compares them, and others load a tiny random checkpoint of each class and compare all its logits with transformers, in fp32 to 1e-4: whole prompts, chunks, batches, and adapters on every linear module with PEFT.

`config.json` names a class under `architectures`, or else `model_type` does. The classes of the first two tables are computed by our own decoder; others [by the transformers library](#by-the-transformers-library), if that has them. What neither has is refused, with the nearest that loads; so is every key that would change the answers and is not computed; words without effect on a class pass. How to add a class: [adding a model](../internals/adding-a-model.md).
"""
_FORMS = """## Weights, adapters, devices

The same for all classes above, as each is one decoder over the same ops:

| | CPU | GPU |
|---|---|---|
| weights of a folder: F32, F16, BF16 | native kernels in float32 and bfloat16 | Triton kernels in bfloat16 and float16 |
| `--quantization int8_dynamic`, `int8_weight_only` | all linear modules | refused |
| `--quantization widened`: a quantised checkpoint in the model's type | all linear modules | all linear modules |
| a GGUF file, or the first of a split one, or `org/name:Q4_K_M` on the hub: {types} | dequantised, as stored (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ2_XXS, IQ2_XS, IQ2_S, IQ4_NL, IQ4_XS, MXFP4, NVFP4), or both ([which](../guide/weight-forms.md#forms-of-a-gguf-file)); `--quantization gguf`, `gguf_dynamic`: as stored, activations of 15 or 8 bits (Q4_0, Q4_1, Q8_0), or of 8 alone (Q5_0, Q5_1, Q2_K to Q6_K, IQ4_XS) | as stored, those of fewer than 4 bits in 4 |
| `--kv-cache-dtype int8` | yes | yes |
| `--kv-cache-dtype fp8` | refused: `int8` is as small, and faster | yes |
| LoRA adapters on every linear module, embedding and head; routers and shared experts | batched, native | batched, Triton |
| LoRA adapters on experts, stacked (`target_parameters`) or one by one | batched, native | batched, Triton; steps with them run without CUDA graphs |
| experts in MXFP4 (gpt-oss; also in GGUF files) | as stored, with the bits of the widened form | as stored |
| GPTQ (2, 3, 4, 8 bits, `desc_act`, versions 1 and 2), AWQ (gemm, gemv), compressed-tensors `pack-quantized`, `int-quantized`, `naive-quantized` | integers of 4 bits, and symmetric ones of 8, as stored by the rule of GGUF files, or of 8 bits with scales of rows in these; others widened | as stored, those of 2 and 3 bits in 4 |
| torchao's INT8, E4M3 and integers in bytes, optimum-quanto's `qint8` and `qfloat8`; compressed-tensors `float-quantized`, `nvfp4-pack-quantized`, `mxfp4-pack-quantized`; FP8 by tensor, row or block (DeepSeek V3, Kimi K2, ModelOpt, FBGEMM), or by block of all experts in one tensor (Step 3.5); MXFP8 (MiniMax M3); ModelOpt NVFP4; bitsandbytes NF4, FP4, LLM.int8() | FP8 in its 8 bits, LLM.int8() in its 8, NVFP4 and MXFP4 in their 4, with the bits of the widened form; MXFP8, NF4 and FP4 widened | as stored |

Activations are rounded to 8 bits only on a CPU, in bfloat16, for weights of 8 bits that were made for it (W8A8, LLM.int8()); `--quantization widened` keeps them whole.

How weights are kept, by storage and device: [weight forms](../guide/weight-forms.md). Below, bits of a value, and processor time of a row's product, in multiples of bfloat16's ([measured](../../benchmarks/results/README.md)):

{forms}

On a GPU, norms of all query heads together (OLMo 2 and 3), layer norms of heads (Command R+), additions outside of norms, routing and the sum of a token's experts are plain torch; all else is Triton. Heads of more than 256 dimensions, those of Gemma 4's full layers, are attended to by plain torch, and steps are then not captured.

Router and the shared expert's gate stay in the model's type under `--quantization`. Layers that predict further tokens (MTP modules of GLM-4.5, DeepSeek V3, MiMo, Ling 2, Qwen3-Next, Qwen 3.5 and 3.6) are loaded where `--speculative-config '{{"method": "mtp"}}'` drafts by them, on a CPU and from a folder, else not. Mixtures not in the table are refused by name.

*Latent attention* (DeepSeek V2 and V3, R1, Kimi K2) keeps one vector of each token in the KV pool for all heads: `kv_lora_rank + qk_rope_head_dim` numbers a layer, 576 in published models, where keys and values of 128 heads were 40,960. `kv_b_proj` is applied to queries and results, never to what is cached (the absorbed form). LoRA on every linear module is exact, `kv_b_proj` included, which is computed at the adapter's own rank; with DoRA, and in an activated LoRA, `kv_b_proj` is refused by name. KV of 8 bits is refused.

*Indexed attention* (DeepSeek V3.2, GLM-5): a token sees the `index_topk` tokens that an index of its layer, or in GLM-5.2 of an earlier one, scores highest, 2,048 as published. Its keys are in the KV pool beside the latent vectors, 128 numbers a layer. As in transformers, scores are in the model's type, where the published code has an orthogonal transform and 8 bits. LoRA on the index is exact. Where `--max-model-len` is at most `index_topk`, the index has no effect and is not loaded. On a GPU longer sequences are refused by name, and steps on a CPU are not recorded.

*Indexed blocks* (MiniMax M3): in all but the first layers a token sees, for each KV head, the `index_topk_blocks` blocks of `index_block_size` tokens that an index scores highest, 16 of 128 as published, the last `index_local_blocks` always. Its keys are in the KV pool beside K and V, 128 numbers a layer. LoRA on the index is exact. Where `--max-model-len` is at most 2,048, the index has no effect and is not loaded. Beyond, GPUs, KV of 8 bits and tensor-parallel ranks are refused by name, and steps on a CPU are not recorded.

*ALiBi* (BLOOM, MPT): each head of a query and of a key has 16 more dimensions, in which the bias is a rotation, exact to float32. They are in the KV pool too, which keeps the model's type (`--kv-cache-dtype auto`). Contexts end at 65,536 tokens, and float16 is refused. MPT with `clip_qkv` (StoryWriter) is refused by name, and so is Falcon RW, whose code rounds each bias to bfloat16.

*Laguna*: layers have numbers of query heads of their own; a soft cap of the router's logits is refused.

*MiMo V2 Flash*: values have 128 dimensions and take as much of the KV pool as keys, 192. As in transformers, a token sees `sliding_window_size` tokens in front of it. MTP modules are not loaded.

*Gemma 4*: a page has no cells in layers that read the keys of others: E2B takes 18 KiB a token, not 42. GGUF files of 26B-A4B, which has experts beside its MLPs, are refused.
"""
_PUBLISHED = """## Published repositories

From the `config.json` of each repository, or its sizes in public code, by the reader that loads it; weights were not tried. `rootgraft doctor NAME` says the same without a download, with the reason of each `n`. Forms beside the first are what others publish of the same model: FP8 in blocks, GPTQ and AWQ of 4 bits, GGUF files by quantisation, of which all types of tensors must be read.
"""
_RATIO = "on two cores of a CPU our decoder is 1.9 times as fast for one stream, and 1.5 times for four"
_ROPE = """## Rotary embeddings

Types under `rope_parameters` or `rope_scaling`: {types}. `su` is an old name of `longrope`. A rotary embedding may cover a part of each head, pair neighbouring dimensions or the two halves, and be left out in some layers, as the class says.

- **longrope** (Phi-3 with 128k, Phi-4-mini) has two tables: sequences of at most `original_max_position_embeddings` tokens are rotated by the short factors, longer ones by the long factors, all their tokens, as in transformers. KV of the one kind is of no use for the other: they are different namespaces of the prefix cache. A sequence that outgrows the length while it is generated is preempted and computed anew, once. Where `--max-model-len` is at most the original length, there are only short ones.
- **dynamic** (InternLM 2 and 3) changes nothing up to `max_position_embeddings`. Beyond, the frequencies would change with every token and with them all cached keys: no sequence is longer. With an `alpha` (HunYuan) it is a fixed base.
- **yarn** of Ministral 3 has `llama_4_scaling_beta`: queries are multiplied by a factor that grows with their position. Llama 4 has such a factor in its layers without rotary embedding (`attn_temperature_tuning`), and sees chunks of `attention_chunk_size` tokens in the others.
- **yarn** extends `max_position_embeddings` where it names `original_max_position_embeddings`.
"""

_LIBRARY = """## By the transformers library

`--model-impl transformers` computes a model by its own modules in the [transformers](https://github.com/huggingface/transformers) library (`pip install 'rootgraft[transformers]'`) over our KV pool, prefix tree, batches, adapters, grammars and sampler. `auto`, the default, does so for every class that our decoder lacks, `rootgraft` (and vLLM's `vllm`) never. It is slower, as a line at the start says: op by op in PyTorch, without fused kernels, recorded steps and CUDA graphs; linear modules use our packed products on a CPU. SmolLM2-135M in float32 has the same greedy tokens both ways; {ratio}.

Code from a model's repository is never run. Before it serves, each model computes two short prompts in chunks and batches over pages, and by its own attention in whole: if logits differ by more than rounding, it is refused. The tests compare these classes in fp32 to 1e-4, in chunks, batches, behind cached prefixes, and with PEFT's adapters on their linear modules:

{classes}.

Any other causal class of the library loads if it passes that check. Refused by name: attention outside of the library's interface, as with ALiBi (Falcon RW); masks but causal ones and sliding windows (chunks, Doge); two calls of attention in a layer (DiffLlama); recurrent states and convolutions (RWKV); encoders; cross attention; multimodal checkpoints but [those above](#language-models-of-multimodal-checkpoints); quantised ones, GGUF files and `--quantization`; other tensors than the class has. With longrope the context ends at `original_max_position_embeddings`.

Adapters change linear modules, the embedding and the head; those on experts are refused. Latent attention (MiniCPM 3) keeps whole keys and values in the pool, and values with fewer dimensions than keys take as much as these. Layers that read the keys of others (Gemma 3n) have none in the pool. A result may depend on the other rows of a step in its last bits, as on a GPU.
"""

# Families of this year that our decoder lacks: models, and their class.
IN_TRANSFORMERS = {
    "DeepSeek V4": "DeepseekV4ForCausalLM",
    "Step 3.7": "Step3p7ForConditionalGeneration",
}
ELSEWHERE = {
    "Kimi K3": "KimiK3ForConditionalGeneration",
    "Ling 2.5 and Ring 2.5": "BailingMoeV2_5ForCausalLM",
    "Baichuan and Baichuan 2": "BaichuanForCausalLM",
    "Llama-Nemotron Super": "DeciLMForCausalLM",
}

_MISSING = """## Missing

Our decoder lacks these, and refuses them by name: {present}. The library takes one only if it passes the check above; the tests prove none. Not in transformers 5.24: {absent}.
"""

_VOCABULARIES = """## Vocabularies

Folders need a `tokenizer.json`, a tiktoken file of Kimi, Qwen 1 (`qwen.tiktoken`) or GLM-4 (`tokenizer.model`), or a SentencePiece model of the kind BPE (`tokenizer.model` of Llama 2, Mistral, Yi, InternLM 2). GGUF files: kinds `llama` (SentencePiece), `gemma4`, and `gpt2` with every name that llama.cpp writes in `tokenizer.ggml.pre`, cut as the original tokenizers do ([table](../../engine/text/gguf_pre_tokenizers.py)). The ids are those of llama.cpp's own tests. For others, `--tokenizer` takes the original's folder.
"""
_WINDOWS = {
    "never": "full",
    "all": "sliding in all layers, if any",
    "late": "sliding from a layer on, if any",
    "no_rope": "sliding without rotary embedding, if any",
    "pattern": "sliding in all but every n-th layer",
    "leading": "sliding in all but every n-th layer from the first on",
    "asked": "sliding in all layers, if asked for",
    "early": "sliding in every second of the first layers, if asked for",
    "listed": "sliding in listed layers",
    "prefixed": "sliding in all but every n-th layer",
    "flagged": "sliding in all but the first and every sixth layer",
    "chunks": "in chunks where there is a rotary embedding, if any",
}
_NO_ROPE = {
    "never": "",
    "listed": "; none in listed layers",
    "full": "; none in full layers",
    "windowed": "; none in full layers",
    "sparse": "; none in full layers with experts",
    "asked": "; mostly none",
    "null": "; none if its base is null",
}

_RECURRENT = {
    "short_conv": "short convolutions",
    "mamba": "Mamba",
    "normed_mamba": "Mamba",
    "weighted_mamba": "Mamba",
    "mamba2": "Mamba-2",
    "delta": "gated delta nets",
    "grouped_delta": "gated delta nets",
    "separate_delta": "gated delta nets",
    "kimi_delta": "Kimi delta attention",
    "wide_kimi_delta": "Kimi delta attention",
}

_BLOCKS = {"single": "a mixer or an MLP", "recurrent": "no MLP", "parallel": "attention beside a state space"}
_BLOCKS["shared"] = "no MLP; in some a block of attention and MLP, which others share, before the state space"


def page() -> str:
    """The whole page, in Markdown."""
    types = ", ".join(sorted({name for name, _, _ in TENSOR_TYPES.values()}))
    return "\n".join(
        [
            _INTRODUCTION,
            "## Classes\n",
            _table(),
            "## Language models of multimodal checkpoints\n",
            "Weights of the other towers are not loaded; images in a request are refused.\n",
            _multimodal(),
            _PUBLISHED,
            _published(),
            _ROPE.format(types=", ".join(f"`{name}`" for name in ROPE_TYPES)),
            _FORMS.format(types=types, forms=forms_table()),
            _VOCABULARIES,
            _LIBRARY.format(classes=", ".join(f"`{name}`" for name in LIBRARY_CLASSES), ratio=_RATIO),
            _MISSING.format(present=_named(IN_TRANSFORMERS), absent=_named(ELSEWHERE)),
        ]
    )


def _named(families: dict[str, str]) -> str:
    return ", ".join(f"{models} (`{name}`)" for models, name in families.items())


def _table() -> str:
    head = ["| models | class | rotary embedding | attention | layer | GGUF |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *map(_row, FAMILIES)]) + "\n"


def _row(family: Family) -> str:
    gguf = "" if family.gguf_name is None else f"`{family.gguf_name}`"
    windows = "full, latent" if family.latent else _WINDOWS[family.windows]
    windows += ", indexed" if family.indexed else ", of indexed blocks" if family.block_index else ""
    windows = "none" if family.blocks == "recurrent" else windows
    cells = (family.models, f"`{family.architecture}`", _rope(family), windows, _layer(family), gguf)
    return f"|{'|'.join(cells)}|"


def _rope(family: Family) -> str:
    if family.no_rope == "always":
        return "ALiBi" if family.alibi else "none; learned positions" if family.learned_positions else "none"
    pairs = "neighbours" if family.interleaved else "halves"
    part = ", a part" if family.partial_rotary or family.latent else ""
    own = ", another one in sliding layers" if family.local_theta else ""
    own += ", backwards" if family.rotates_back else ""
    own += ", a base of its own in each layer, if listed" if family.layer_thetas else ""
    scaled = "; queries scaled by position" if family.scaled_queries or family.attention_temperature else ""
    return f"{pairs}{part}{own}{_NO_ROPE[family.no_rope]}{scaled}"


def _layer(family: Family) -> str:
    norms = "layer norms" if family.layer_norm else "RMS norms"
    if family.parallel_block:
        norms = f"one {norms[:-1]}, attention beside the MLP"
    elif family.parallel_flag is not None:
        norms += f", attention beside the MLP by `{family.parallel_flag}`"
    elif family.norms.before_attention is None:
        norms += " behind"
    elif family.norms.after_attention is not None:
        norms += " before and behind"
    norms += " without weights, of embeddings too" if family.embedding_norm else ""
    norms += ", in front in gated delta nets" if family.recurrent_norms is not None else ""
    norms += ", of experts also behind" if family.mixture_norms is not None else ""
    heads = {"head": "of q and k", "projection": "of all q, all k"}
    norms += ", one behind the embedding" if family.embedding_norm is not None else ""
    heads |= dict.fromkeys(("centred", "biased"), f"of q and k, by `{family.qk_norm_flag}`")
    parts = [norms]
    if family.qk_norm is not None:
        parts.append(f"norms {heads[family.qk_norm]}" + (" after the rotation" if family.is_qk_normed_last else ""))
    if family.head_bias:
        parts.append("a bias of the head")
    if family.norm_head:
        parts.append("a head of unit columns, by `norm_head`")
    if not family.gated_mlp:
        trained = " and with a trained activation" if family.defaults.get("hidden_act") == "xielu" else ""
        parts.append(f"MLP without gate{trained}")
    if family.blocks in _BLOCKS:
        parts.append(_BLOCKS[family.blocks])
    if family.sized_layers:
        parts.append("normed values, larger heads in full layers, shared K and V")
    if family.layer_inputs:
        parts.append("an input of each layer")
    if family.multipliers or family.logit_scale:
        parts.append("multipliers" if family.multipliers else "logit scale")
    if family.attention_soft_cap or family.logit_soft_cap:
        parts.append("soft caps")
    if family.gated_attention:
        parts.append("gated attention")
    if family.attention_sinks:
        parts.append("attention sinks" + (" in sliding layers" if family.windowed_sinks else ""))
    if family.value_dim_key is not None:
        parts.append("values narrower than keys")
    if family.window_kv_heads_key is not None:
        parts.append("more KV heads in sliding layers")
    if family.mixture is not None:
        parts.append(_experts(family.mixture))
    if family.recurrent is not None:
        parts.append(f"{_RECURRENT[family.recurrent]} ([hybrid](../internals/hybrid-models.md))")
    return ", ".join(parts)


def _experts(mixture: MixtureFamily) -> str:
    shared = " and a shared one" if mixture.shared_size_key else ""
    some = {
        "none": "",
        "stepped": " in some layers",
        "first": " behind the first layers",
        "typed": " behind the first layers",
        "spanned": " in some layers",
        "unlisted": " in some layers",
        "periodic": " in every n-th layer",
    }[mixture.dense_layers]
    clamped = ", clamped SwiGLU" if mixture.clamped else ", of weighted inputs" if mixture.weighs_input else ""
    shared = " beside the MLP, if asked for" if mixture.beside_mlp else shared
    scores = mixture.scores if mixture.scores_key is None else "softmax or sigmoid"
    return f"experts{shared}{some}, {scores} router{', groups' if mixture.grouped else ''}{clamped}"


def _published() -> str:
    plain, quantised = [], []
    for name, config in published_models().items():
        answers = form_answers(config)
        cells = ["y" if answer.loads else "n" for answer in answers]
        if len(answers) > 1:
            plain.append(f"| {name} | {' | '.join(cells)} |")
        else:
            quantised.append(f"| {name} | {answers[0].form} | {cells[0]} |")
    head = [f"| repository | {' | '.join(FORMS)} |", "|---" * (len(FORMS) + 1) + "|"]
    return "\n".join([*head, *plain, "", "| quantised repository | form | loads |", "|---|---|---|", *quantised]) + "\n"


def _multimodal() -> str:
    head = ["| class | language model as | not loaded | GGUF |", "|---|---|---|---|"]
    by_library = (
        f"| `{name}` | `{each.text_class}` of the library | {', '.join(f'`{tower}`' for tower in each.towers)} | |"
        for name, each in LIBRARY_WRAPPERS.items()
    )
    return "\n".join([*head, *map(_tower_row, MULTIMODAL), *by_library]) + "\n"


def _tower_row(whole: Multimodal) -> str:
    same = {"mistral": "llama"}.get(whole.family.name, whole.family.gguf_name)
    gguf = GGUF_OF_WHOLE.get(whole.family.architecture, same)
    assert gguf is None or gguf in BY_GGUF_NAME
    towers = ", ".join(f"`{tower}`" for tower in whole.towers)
    stored = "" if gguf is None else f"`{gguf}`"
    return f"| `{whole.family.architecture}` | `{whole.family.name}` | {towers} | {stored} |"


if __name__ == "__main__":
    print(page(), end="")
