"""``AsyncLLM`` over its own engine process, against ``LLM`` with the same model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rootgraft import LLM, AsyncEngineArgs, AsyncLLM, RequestOutput, SamplingParams
from rootgraft.engine.errors import EngineDead
from rootgraft.engine.offline.vllm_table import NotOffered, peer_names
from rootgraft.lora.request import LoRARequest
from rootgraft.sampling_params import RequestOutputKind

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
ENDLESS = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
PROMPTS = ["the quick", "in the hills of", "a fox is"]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncLLM]:
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "kv_cache_memory": 0.02, "dtype": "float32"}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny_model), max_lora_rank=8, **options))
    yield engine
    engine.shutdown()


async def collect(engine: AsyncLLM, prompt: Any, params: SamplingParams, name: str, **more: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name, **more)]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [each.text for each in outputs[-1].outputs]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_many_generators_write_what_llm_writes(engine: AsyncLLM, llm: LLM, kind: RequestOutputKind) -> None:
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    async def ask() -> list[list[RequestOutput]]:
        params = replace(GREEDY, output_kind=kind)
        return await asyncio.gather(*(collect(engine, each, params, each) for each in PROMPTS))

    for prompt, outputs, whole in zip(PROMPTS, asyncio.run(ask()), expected, strict=True):
        assert [each.finished for each in outputs] == [False] * (len(outputs) - 1) + [True]
        assert {each.request_id for each in outputs} == {prompt}
        last, answer = outputs[-1], whole.outputs[0]
        assert last.outputs[0].finish_reason == answer.finish_reason == "length" and last.outputs[0].finished()
        assert (last.prompt, last.prompt_token_ids, last.usage[0].completion) == (prompt, whole.prompt_token_ids, 12)
        assert last.outputs[0].cumulative_logprob == pytest.approx(answer.cumulative_logprob, abs=1e-4)
        parts = [each.outputs[0] for each in (outputs if kind is RequestOutputKind.DELTA else outputs[-1:])]
        assert "".join(part.text for part in parts) == answer.text
        assert [token for part in parts for token in part.token_ids] == answer.token_ids
        assert sum(len(part.logprobs or ()) for part in parts) == 12
        first = outputs[0].prompt_logprobs
        assert first is not None and whole.prompt_logprobs is not None
        assert [each and set(each) for each in first] == [each and set(each) for each in whole.prompt_logprobs]
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1
        if kind is RequestOutputKind.CUMULATIVE:
            lengths = [len(each.outputs[0].token_ids) for each in outputs]
            assert lengths == sorted(lengths) and all(answer.text.startswith(each.outputs[0].text) for each in outputs)


def test_several_answers_and_their_seeds(engine: AsyncLLM, llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=8, temperature=1.0, seed=5, stop=["e"])
    [whole] = llm.generate("the quick", params, use_tqdm=False)

    async def ask() -> tuple[list[RequestOutput], list[RequestOutput]]:
        final = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        delta = replace(params, output_kind=RequestOutputKind.DELTA)
        return await collect(engine, "the quick", final, "a"), await collect(engine, "the quick", delta, "b")

    [final], deltas = asyncio.run(ask())
    assert [each.text for each in final.outputs] == [each.text for each in whole.outputs]
    for index, answer in enumerate(whole.outputs):
        parts = [part for output in deltas for part in output.outputs if part.index == index]
        assert "".join(part.text for part in parts) == answer.text
        assert (parts[-1].finish_reason, parts[-1].stop_reason) == (answer.finish_reason, answer.stop_reason)
        assert all(part.finish_reason is None for part in parts[:-1])


def test_requests_that_are_aborted_left_or_cancelled_end(engine: AsyncLLM) -> None:
    async def ask() -> None:
        async def read(name: str, begun: asyncio.Event) -> list[RequestOutput]:
            outputs = []
            async for output in engine.generate("the quick", ENDLESS, name):
                outputs.append(output)
                begun.set()
            return outputs

        begun = {name: asyncio.Event() for name in "abc"}
        tasks = {name: asyncio.create_task(read(name, event)) for name, event in begun.items()}
        for event in begun.values():
            await event.wait()
        await engine.abort("a")
        await engine.abort(["b", "unknown"])
        for name in "ab":
            last = (await tasks[name])[-1]
            assert last.finished and last.outputs[0].finish_reason == "abort"
        tasks["c"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks["c"]
        async for _ in engine.generate("the quick", ENDLESS, "d"):
            with pytest.raises(ValueError, match="request_id 'd' is in use"):
                await collect(engine, "the fox", ENDLESS, "d")
            break
        early = asyncio.create_task(collect(engine, "the fox", ENDLESS, "e"))
        await asyncio.sleep(0)
        await engine.abort("e")
        assert (await early)[-1].outputs[0].finish_reason == "abort"
        # The names are free again, and what was left runs no more.
        assert (await collect(engine, "the fox", GREEDY, "c"))[-1].finished
        while engine._engine._client.stats.get("running", 1):
            await asyncio.sleep(0.01)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("prompt", "params", "more", "words"),
    [
        ("a", SamplingParams(temperature=-1.0), {}, "temperature"),
        ("a", SamplingParams(repetition_detection={"min_count": 2}), {}, "repetition_detection is not supported"),
        ("a", SamplingParams(structured_outputs={"regex": "("}), {}, "regex"),
        ({"nonsense": 1}, GREEDY, {}, "nonsense"),
        ("a " * 600, GREEDY, {}, "512"),
        ("a", GREEDY, {"priority": "high"}, "priority must be a whole number, not 'high'"),
        ("a", GREEDY, {"reasoning_ended": True}, "reasoning_ended is not supported"),
        ("a", GREEDY, {"lora_request": LoRARequest("no", 9, "/no/such/folder")}, "no"),
    ],
)  # fmt: skip
def test_wrong_requests_are_value_errors(
    engine: AsyncLLM, prompt: Any, params: SamplingParams, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        asyncio.run(collect(engine, prompt, params, "x", **more))
    assert engine.is_running and not engine.errored


def test_adapters_come_with_requests_and_by_name(engine: AsyncLLM, llm: LLM, adapters: list[Path]) -> None:
    one, two = (LoRARequest(f"async{number}", number, str(path)) for number, path in enumerate(adapters, 1))
    expected = [each.outputs[0].text for each in llm.generate(["the fox"] * 2, GREEDY, lora_request=[one, two])]

    async def ask() -> None:
        assert await engine.add_lora(one)
        assert await engine.list_loras() == {1}
        both = await asyncio.gather(
            *(collect(engine, "the fox", GREEDY, each.lora_name, lora_request=each) for each in (one, two))
        )
        assert [texts(outputs)[0] for outputs in both] == expected and both[0][-1].lora_request == one
        assert await engine.list_loras() == {1, 2}
        assert await engine.pin_lora(2) and await engine.remove_lora(2) and not await engine.remove_lora(2)
        with pytest.raises(ValueError, match="lora_id 2 is not the id of a loaded adapter"):
            await engine.pin_lora(2)
        with pytest.raises(ValueError):
            await engine.add_lora(LoRARequest("wrong", 3, "/no/such/folder"))
        assert await engine.list_loras() == {1}

    asyncio.run(ask())


def test_priorities_cache_and_the_small_methods(engine: AsyncLLM, tiny_model: Path) -> None:
    async def ask() -> None:
        plain = replace(GREEDY, prompt_logprobs=None)
        ordered = [await collect(engine, "in the hills", plain, "p", priority=number) for number in (-1, 0, 7)]
        assert len({texts(outputs)[0] for outputs in ordered}) == 1
        assert ordered[-1][-1].num_cached_tokens > 0
        assert await engine.reset_prefix_cache()
        assert (await collect(engine, "in the hills", plain, "p"))[-1].num_cached_tokens == 0
        config = await engine.get_model_config()
        assert (config.model, config.max_model_len) == (str(tiny_model), 512)
        assert (await engine.get_tokenizer()).decode([346]) == "the"
        await engine.check_health()
        for name, row in peer_names("AsyncLLM").items():
            if row.status == "inert":
                assert await getattr(engine, name)() is None
            elif row.status == "done":
                getattr(engine, name)
            else:
                with pytest.raises(NotOffered, match=re.escape(f"AsyncLLM.{name} does not exist: {row.words}.")):
                    getattr(engine, name)
        with pytest.raises(AttributeError, match="nonsense"):
            _ = engine.nonsense

    asyncio.run(ask())


def test_shutdown_ends_what_runs(tiny_model: Path) -> None:
    engine = AsyncLLM(str(tiny_model), kv_cache_memory=0.02)

    async def ask() -> None:
        with pytest.raises(EngineDead, match="was shut down"):
            async for _ in engine.generate("the quick", replace(ENDLESS, max_tokens=500), "0"):
                if engine.is_running:
                    engine.shutdown()

    asyncio.run(ask())
    engine.shutdown()
    assert not engine.is_running and engine.errored and engine.is_stopped
    with pytest.raises(EngineDead, match="create another one"):
        asyncio.run(engine.check_health())
    with pytest.raises(EngineDead):
        asyncio.run(collect(engine, "a", GREEDY, "0"))
