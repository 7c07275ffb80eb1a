"""OpenVINO GenAI behind the least HTTP: its continuous batching, for loads that want a server of OpenAI's kind.

    python benchmarks/serve/peers/openvino_server.py MODEL_FOLDER PORT

OpenVINO GenAI has no server of its own. This one knows what the loads send (messages, ``max_tokens``, ``ignore_eos``,
``json_schema``, temperature; streamed) and does as little as it can for it: one thread steps the pipeline, and a step's
tokens go to the event loop together. A step holds Python's lock, so they may leave late: in process it is a third
faster. It needs ``openvino-genai``, ``starlette``, ``uvicorn``, ``uvloop`` and ``httptools`` in an environment of its
own. The folder is made by

    optimum-cli export openvino -m MODEL --task text-generation-with-past --weight-format fp16 MODEL_FOLDER
"""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import openvino_genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "openvino"
_ALL_TOKENS = 2**62  # as top_k: no filter
# A step's news of one request: its new tokens, and why it ended if it did.
News = tuple[list[int], str | None]


class Running:
    """A request in the pipeline, and the queue through which the event loop hears of its tokens."""

    def __init__(self, tokens: Any, config: openvino_genai.GenerationConfig) -> None:
        self.tokens = tokens
        self.config = config
        self.news: asyncio.Queue[News] = asyncio.Queue()


class Engine:
    """The pipeline and the one thread that steps it."""

    def __init__(self, folder: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 4
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler_config=scheduler, device="CPU")
        self.tokenizer = self._pipeline.get_tokenizer()
        self.end = self.tokenizer.get_eos_token_id()
        self._arrived: queue.SimpleQueue[Running] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, running: Running) -> None:
        self._arrived.put(running)

    def _run(self) -> None:
        numbers = itertools.count()
        live: list[tuple[Any, Running]] = []
        while True:
            while not live or not self._arrived.empty():
                running = self._arrived.get()
                live.append((self._pipeline.add_request(next(numbers), running.tokens, running.config), running))
            self._pipeline.step()
            news = [(running, self._read(handle)) for handle, running in live]
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_tell, news)
            live = [pair for pair, (_, (_, finish)) in zip(live, news, strict=True) if finish is None]

    def _read(self, handle: Any) -> News:
        tokens: list[int] = []
        while handle.can_read():
            for output in handle.read().values():
                tokens += output.generated_ids
        if handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
            return tokens, None
        return tokens, "stop" if tokens and tokens[-1] == self.end else "length"


def _tell(news: list[tuple[Running, News]]) -> None:
    for running, what in news:
        if what[0] or what[1]:
            running.news.put_nowait(what)


class Server:
    """The two routes that the loads ask for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seeds = itertools.count()

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        tokenizer = self._engine.tokenizer
        prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        tokens = tokenizer.encode(prompt, add_special_tokens=False).input_ids
        running = Running(tokens, self._config(body))
        self._engine.add(running)
        return StreamingResponse(self._events(running), media_type="text/event-stream")

    def _config(self, body: dict[str, Any]) -> openvino_genai.GenerationConfig:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        if body.get("temperature"):
            config.do_sample = True
            config.temperature = float(body["temperature"])
            config.top_p = float(body.get("top_p", 1.0))
            config.top_k = int(body.get("top_k") or 0) or _ALL_TOKENS
            config.rng_seed = next(self._seeds)
        else:
            config.do_sample = False
        config.ignore_eos = bool(body.get("ignore_eos"))
        if not config.ignore_eos:
            config.eos_token_id = self._engine.end
        if form := body.get("response_format"):
            schema = json.dumps(form["json_schema"]["schema"])
            config.structured_output_config = openvino_genai.StructuredOutputConfig(json_schema=schema)
        return config

    async def _events(self, running: Running) -> AsyncIterator[str]:
        count, finish = 0, None
        pending: list[int] = []
        while finish is None:
            tokens, finish = await running.news.get()
            count += len(tokens)
            pending += [token for token in tokens if token != self._engine.end]
            text = self._engine.tokenizer.decode(pending) if pending else ""
            if text.endswith("\ufffd") and finish is None:
                continue  # a character of which bytes are still to come
            pending.clear()
            yield _event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})
        prompt = int(running.tokens.shape[1])
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def _event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps({'object': 'chat.completion.chunk', 'model': MODEL, **fields})}\n\n"


def main() -> None:
    folder, port = sys.argv[1:]
    engine = Engine(folder)
    server = Server(engine)
    routes = [Route("/v1/models", server.models), Route("/v1/chat/completions", server.chat, methods=["POST"])]

    async def serve() -> None:
        engine.start(asyncio.get_running_loop())
        config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=int(port), log_level="warning")
        await uvicorn.Server(config).serve()

    # Uvicorn takes uvloop for the loop only where it starts the loop itself.
    import uvloop

    uvloop.run(serve())


if __name__ == "__main__":
    main()
