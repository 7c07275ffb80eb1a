"""End tokens of a GGUF file: tokens that its keys name, and tokens known by their text, as in llama.cpp."""

from __future__ import annotations

from typing import Any

import numpy as np

_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

# Ends of turns, messages and documents, which count regardless of the keys: conversions mostly name only one of several
# end tokens. The list is llama.cpp's (``special_eog_ids`` of llama-vocab.cpp).
_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "</s>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<|return|>",
    "<|call|>", "<|calls|>", "<|flush|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip
_MARKUP = frozenset({"</s>"})  # a tag of HTML in some vocabularies, Gemma's for one: an end only as a control token
_CONTROL = 3  # tokenizer.ggml.token_type


def gguf_end_tokens(metadata: dict[str, Any]) -> list[Any]:
    """Return the ids of a file's end tokens; ids from its keys come first, and are not checked yet."""
    named = [metadata[key] for name in _KEYS if (key := f"tokenizer.ggml.{name}_token_id") in metadata]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    control = set(np.flatnonzero(types == _CONTROL).tolist()) if isinstance(types, np.ndarray) else set()
    known = [
        token
        for token, text in enumerate(tokens if isinstance(tokens, list) else ())
        if text in _TEXTS and (token in control or text not in _MARKUP)
    ]
    return list(dict.fromkeys([*named, *known]))
