"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``, with vLLM's fields."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter

from ...engine.serving.request_threads import on_request_thread
from ...engine.text.prompt_cache import Owner
from ..errors import HTTPError
from ..generate.build_request import chat_tokens, token_array
from ..protocol.tokenize import DetokenizeRequest, TokenizeRequest
from .dependencies import CallerOf, JsonRoute, State

# Number of tokens. Up to this number, the event loop decodes tokens itself, without another thread.
_MANY_TOKENS = 4096

router = APIRouter(route_class=JsonRoute, tags=["tokens"])


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, state: State, caller: CallerOf) -> dict[str, Any]:
    """Tokenize a text or a conversation."""
    target = await state.models.locate(body.model, caller)
    async_engine = target.engine
    if body.messages is not None:
        tokens = await chat_tokens(target, body.chat(body.messages), caller)
    else:
        add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
        owner = Owner(caller.cache_tenant)
        tokens = await async_engine.encode(body.prompt or "", add_special_tokens=add_special_tokens, owner=owner)
    strings = None
    if body.return_token_strs:
        strings = async_engine.tokenizer.pieces(tokens)
    return {
        "count": len(tokens),
        "max_model_len": async_engine.max_model_len,
        "tokens": tokens.tolist(),
        "token_strs": strings,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, state: State, caller: CallerOf) -> dict[str, Any]:
    """Convert tokens to text."""
    async_engine = (await state.models.locate(body.model, caller)).engine
    tokens = token_array("tokens", body.tokens, async_engine.vocab_size)
    decode = partial(async_engine.tokenizer.decode, tokens, skip_special_tokens=False)
    return {"prompt": decode() if len(tokens) <= _MANY_TOKENS else await on_request_thread(decode)}


@router.get("/tokenizer_info")
async def tokenizer_info(state: State, _caller: CallerOf) -> dict[str, Any]:
    """Get the tokenizer's configuration, for clients that count tokens or render templates themselves."""
    if not state.options.enable_tokenizer_info_endpoint:
        problem = "This route is off: start the server with --enable-tokenizer-info-endpoint."
        raise HTTPError(404, problem, code="unknown_url")
    async_engine = state.engine.serving()
    tokenizer = async_engine.tokenizer
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": async_engine.max_model_len,
        **tokenizer.special_tokens,
        "chat_template": tokenizer.chat_template,
    }
