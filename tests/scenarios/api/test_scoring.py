"""lm-eval's ``local-completions``: the request that it sends and the numbers that it reads out, as transformers'."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.api.api_live import make_state
from support.machine.waits import HANG_SECONDS

from rootgraft.api.http.app import create_app
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import RequestError
from rootgraft.engine.serving.async_engine import AsyncEngine
from rootgraft.engine.serving.engine_client import EngineClient

CONFIG = EngineConfig(dtype="float32", device="cpu", num_gpu_blocks_override=60, threads=1, max_num_seqs=8)
PAIRS = [
    ([5, 9, 11, 40], [7, 8]),
    ([5, 9, 11, 40], [60]),
    ([1], [2, 3, 4, 5, 6, 7]),
    ([13, 13, 13, 13, 13, 13, 13, 13, 13, 13, 13, 13, 13, 13, 13, 13, 13, 80], [1, 2, 3]),
    ([5, 9, 11, 40, 7, 8, 90, 3], [33, 34]),
]


class Tokens:
    """Token ids are all that scoring needs."""

    has_chat_template = False
    special_ids: frozenset[int] = frozenset()
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    named_roles = frozenset[str]()

    def render_chat(self, messages: Any, **_: Any) -> str:
        raise RequestError("There is no chat template.")

    def template_mentions(self, text: str) -> bool:
        return False

    def token_bytes(self, token: int) -> bytes:
        return b"<%d>" % token

    def join_bytes(self, tokens: Any, skip_special_tokens: bool) -> bytes:
        return b"".join(map(self.token_bytes, tokens))

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return self.join_bytes(tokens, skip_special_tokens).decode()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("scored")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def by_transformers(folder: Path) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation, and whether it is what greedy decoding gives: as lm-eval's own backend."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for context, continuation in PAIRS:
        with torch.inference_mode():
            logits = model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
        lines = logits[len(context) - 1 : -1]
        targets = torch.tensor(continuation)
        score = lines.gather(1, targets[:, None]).sum().item()
        found.append((score, bool((lines.argmax(-1) == targets).all())))
    return found


def read_scores(choice: dict[str, Any], context_length: int) -> tuple[float, bool]:
    """What lm-eval makes of an answer to ``echo`` with one token more: it leaves that one out."""
    logprobs = choice["logprobs"]
    scores = logprobs["token_logprobs"][context_length:-1]
    tops = logprobs["top_logprobs"][context_length:-1]
    return sum(scores), all(score == max(top.values()) for score, top in zip(scores, tops, strict=True))


async def test_loglikelihoods_equal_those_of_transformers(model_folder: Path) -> None:
    client = EngineClient(CONFIG, model_folder)
    ready = await client.start()
    state = make_state()
    state.engine.client = client
    state.engine.async_engine = AsyncEngine(client, Tokens(), ready)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(create_app(state))
    body = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

        async def ask(pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
            prompts = [context + continuation for context, continuation in pairs]
            reply = (await http.post("/v1/completions", json={**body, "prompt": prompts}, timeout=HANG_SECONDS)).json()
            choices = sorted(reply["choices"], key=lambda choice: choice["index"])
            for choice, prompt in zip(choices, prompts, strict=True):
                assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
                assert choice["logprobs"]["token_logprobs"][0] is None
            return [read_scores(choice, len(context)) for choice, (context, _) in zip(choices, pairs, strict=True)]

        # Twice, the second time out of the cache; and many at once, as lm-eval does with num_concurrent.
        rounds = [await ask(PAIRS), await ask(PAIRS)]
        rounds += await asyncio.gather(*(ask(PAIRS) for _ in range(4)))
    await client.close()
    expected = by_transformers(model_folder)
    for found in rounds:
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        for (score, _), (wanted, _) in zip(found, expected, strict=True):
            assert score == pytest.approx(wanted, abs=1e-3)
