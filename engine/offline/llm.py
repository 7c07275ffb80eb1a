"""Offline inference: the ``LLM`` class runs prompts through an engine in this process, without a server."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from ...grammar.spec import GrammarSpec
from ...lora.request import LoRARequest
from ..serving.output_processor import TextDelta
from ..text.tokenizer import Tokenizer
from .beam_search import BeamSearchOutput, BeamSearchSequence, outputs_of, search_beams
from .conversations import Conversation, read_conversations
from .inputs import Loras, PromptType, listed_prompts
from .offline_decisions import (
    DecisionAnswer,
    check_labels,
    plan_questions,
    read_answers,
    read_questions,
    score_labels,
    score_prompts,
)
from .offline_engine import OfflineEngine
from .offline_metrics import Metric, OfflineMetrics
from .offline_model import OfflineModel
from .pair_outputs import Pair, PairTools, ScoringOutput, score_pairs, text_pairs
from .pooled_output import (
    ClassificationOutput,
    EmbeddingOutput,
    PooledRequestOutput,
    PoolingOutput,
    as_array,
    check_lengths,
    class_reader,
    embedding_prompts,
    embedding_reader,
    prompt_tokens,
)
from .pooling_params import PoolingParams, PoolingTask, read_pooling_params, read_pooling_task
from .request_inputs import CallOptions, Input, RequestMaker, one_for_each
from .request_output import RequestOutput
from .running_request import RunningRequest
from .sampling_params import AnyParams, BeamSearchParams, SamplingParams
from .tokenizer_face import TokenizerFace
from .vllm_table import check_offered, check_values

P = TypeVar("P")


class LLM:
    """A model in this process, for offline inference.

    An ``LLM`` is not thread-safe and cannot be used in forked processes: each process must create its own.

    The engine and all parts of a step run on a separate thread (``EngineThread``). KeyboardInterrupt, or another
    exception from a signal handler, ends only the wait for a step, never the step itself. After such an interrupt,
    ``generate`` and ``chat`` abort their requests; requests of ``begin`` continue with the next ``step`` and get the
    same tokens. An exception inside a step fails all requests. The next call then works, but the prefix cache is empty.

    Args:
        model: folder in Hugging Face format, GGUF file or name on the hub; None for the default model.
        options: options of ``EngineConfig``, or vLLM's, which are translated, accepted without effect, or refused
            (``docs/reference/options.md``).

    Raises:
        ModelError: the model does not exist or is not supported exactly.
        ConfigError: options do not exist, are out of bounds or contradict each other.

    >>> llm = LLM()
    >>> [output] = llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))
    >>> output.outputs[0].text
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        found = OfflineModel.find(model, options)
        self.tokenizer = found.tokenizer
        self._engine = OfflineEngine(found.config, found.path, self.tokenizer)
        drafts = found.config.speculative
        num_drafts = 0 if drafts.method == "off" else drafts.num_speculative_tokens
        self._metrics = OfflineMetrics(found.name, self._engine.max_model_len, num_drafts)
        self._engine.on_observations = self._metrics.take
        self._requests = RequestMaker.of(found.config, found.path, self._metrics)
        self._faces: dict[Tokenizer, TokenizerFace] = {}

    @classmethod
    def from_engine_args(cls, engine_args: object) -> Self:
        """Create an ``LLM`` from ``EngineArgs``. Raises like the constructor."""
        return cls(**vars(engine_args))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters, which the model's ``generation_config.json`` recommends.

        The name is vLLM's. With ``generation_config="vllm"`` the file is ignored.
        """
        return self._requests.default_params()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's gauges, counters and histograms as metrics with vLLM's names and classes.

        Latencies are measured when answers reach the caller's side of the engine in this process.
        """
        return self._engine.on_thread(lambda: self._metrics.snapshot(self._engine.stats()))

    def get_tokenizer(self, lora_request: LoRARequest | str | None = None) -> TokenizerFace:
        """Return the model's tokenizer, or the tokenizer of an adapter that has its own."""
        tokenizer = self._engine.adapters.texts_of(lora_request).served.tokenizer
        if (face := self._faces.get(tokenizer)) is None:
            face = self._faces[tokenizer] = TokenizerFace(tokenizer)
        return face

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: AnyParams | Sequence[AnyParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        stop: str | Sequence[str] = (),
        n: int | None = None,
        grammar: GrammarSpec | None = None,
        adapter: str | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Generate answers to prompts.

        Args:
            prompts: one text, list of token ids, ``TextPrompt`` or ``TokensPrompt``, or a list of these.
            sampling_params: parameters for all prompts, or one for each; None for ``get_default_sampling_params()``.
            prompt_token_ids: token ids, which replace ``prompts``.
            use_tqdm: whether to show a progress bar.
            lora_request: an adapter for all prompts, or one for each.
            stop: strings that end an answer and are not part of it, in addition to the strings in ``sampling_params``.
            n: number of answers to each prompt, which overrides ``n`` of ``sampling_params``.
            grammar: grammar of structured output, such as ``GrammarSpec.json_schema({...})``.
            adapter: name of a loaded LoRA adapter, None for the base model.
            others: vLLM's further parameters; ``vllm_classes.toml`` describes the effect of each.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestError: a prompt or parameter is out of bounds. Every request is checked before the first one starts.
            UnknownModel: there is no such adapter.
        """
        check_values("LLM.generate", others)
        inputs = self._engine.adapters.inputs(prompts, prompt_token_ids, lora_request, adapter)
        return self._run(inputs, sampling_params, CallOptions(stop, n, grammar), bool(use_tqdm))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: AnyParams | Sequence[AnyParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        stop: str | Sequence[str] = (),
        n: int | None = None,
        grammar: GrammarSpec | None = None,
        adapter: str | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Generate answers to one conversation or several, rendered by the model's chat template. See ``generate``.

        Args:
            chat_template: a Jinja template that replaces the model's.
            chat_template_content_format: a parameter of vLLM, without effect.
            tools: functions in OpenAI's form.
            chat_template_kwargs: further variables for the template.
        """
        check_values("LLM.chat", others | {"chat_template_content_format": chat_template_content_format})
        conversations = read_conversations(messages)
        inputs = []
        for conversation, chosen in zip(
            conversations, self._engine.adapters.for_prompts(len(conversations), lora_request, adapter), strict=True
        ):
            text = chosen.model.served.tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=chat_template_kwargs,
                template=chat_template,
            )
            inputs.append(Input(self._engine.on_thread(partial(chosen.model.encode_chat, text)), text, "", chosen))
        return self._run(inputs, sampling_params, CallOptions(stop, n, grammar), bool(use_tqdm))

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Loras = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """Generate answers to prompts by beam search, as vLLM does.

        Args:
            use_tqdm: whether to show a progress bar of the steps.
            concurrency_limit: a parameter of vLLM, without effect.
            others: vLLM's further parameters; ``vllm_classes.toml`` describes the effect of each.

        Raises:
            RequestError: a prompt or parameter is out of bounds.
        """
        check_values("LLM.beam_search", others)
        given = self._engine.adapters.inputs(prompts, lora_request=lora_request)
        tokenizers = [self.get_tokenizer(each.adapter.asked or each.adapter.name) for each in given]
        ends = [() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,) for tokenizer in tokenizers]

        def scores(beams: Sequence[tuple[int, BeamSearchSequence]], count: int) -> list[dict[int, float]]:
            inputs = [given[prompt] for prompt, _ in beams]
            # The tokens of an answer are passed as generated tokens. So an answer that repeats the invocation of an
            # activated LoRA does not change the position from which the adapter applies.
            answers = [array("i", beam.tokens[len(given[prompt].tokens) :]) for prompt, beam in beams]
            step = SamplingParams(temperature=0, ignore_eos=True, logprobs=count)
            steps = [replace(step, max_tokens=len(answer) + 1) for answer in answers]
            return [_scores_of(output) for output in self._run(inputs, steps, CallOptions(), False, answers)]

        search = search_beams(params, [each.tokens.tolist() for each in given], ends, scores, use_tqdm=use_tqdm)
        return outputs_of(search, [tokenizer.decode for tokenizer in tokenizers])

    def decide(
        self,
        input: str | Conversation,
        questions: Sequence[Mapping[str, Any]],
        *,
        answer_with: str = "letters",
        lora_request: LoRARequest | None = None,
        adapter: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        calibration_dir: str | Path | None = None,
    ) -> list[DecisionAnswer]:
        """Answer typed questions about an input with probabilities, as ``POST /v1/decisions`` does.

        Args:
            input: a text, or a conversation; each question is added to its last user turn.
            questions: dicts with a ``type`` (``predicate``, ``choice`` or ``score``), ``instructions``, ``choices`` or
                ``levels``, and optionally a ``name`` and the name of a ``calibration``.
            answer_with: form of the model's answer: ``letters``, or ``values`` for the texts of the choices.
            chat_template_kwargs: further variables for the template.
            calibration_dir: folder of the calibrations written by ``rootgraft calibrate``.

        Raises:
            RequestError: the input or a question is malformed, or too long; or a calibration is for another question or
                model.
        """
        asked = read_questions(questions, answer_with)
        conversation = [{"role": "user", "content": input}] if isinstance(input, str) else input
        [messages] = read_conversations(conversation)
        [chosen] = self._engine.adapters.for_prompts(1, lora_request, adapter)
        planned = plan_questions(messages, [each.question for each in asked], chosen, chat_template_kwargs or {})
        return read_answers(asked, planned, self._engine.digest_of, calibration_dir, self._run_reads)

    def score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[Sequence[int]],
        label_token_ids: Sequence[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        *,
        lora_request: LoRARequest | None = None,
        adapter: str | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Any,
    ) -> list[list[float]] | list[PooledRequestOutput[ScoringOutput]]:
        """Return the probabilities of given next tokens after a query joined with each item, as SGLang does.

        Without ``label_token_ids``, this is vLLM's method: it returns how relevant each item is to the query. If there
        are as many queries as items, each item is scored with its own query (see ``serving.pair_scoring``).

        Args:
            query: a text or token ids.
            items: items, each of which is joined with the query to one prompt. They are texts or token ids, like the
                query.
            label_token_ids: the tokens whose probabilities are returned.
            apply_softmax: whether to normalize the probabilities over the labels; otherwise they refer to the whole
                vocabulary.
            item_first: whether the item comes before the query.
            others: vLLM's further parameters; ``vllm_classes.toml`` describes the effect of each.

        Raises:
            RequestError: an argument is out of bounds.
        """
        check_values("LLM.score", others)
        if label_token_ids is None:
            return self._score_pairs(text_pairs(query, items), lora_request, adapter, bool(use_tqdm))
        prompts = score_prompts(query, items, item_first=item_first)
        inputs = self._engine.adapters.inputs(prompts, lora_request=lora_request, adapter=adapter)
        labels = check_labels(label_token_ids, inputs[0].adapter.model.served.vocab_size)
        return score_labels(inputs, labels, self._run_reads, apply_softmax=apply_softmax)

    def _score_pairs(
        self, pairs: Sequence[Pair], lora_request: LoRARequest | None, adapter: str | None, use_tqdm: bool
    ) -> list[PooledRequestOutput[ScoringOutput]]:
        def embed(texts: list[str], name: str | None) -> list[PooledRequestOutput[EmbeddingOutput]]:
            asked: dict[str, Any] = {"lora_request": lora_request, "adapter": adapter, "use_tqdm": use_tqdm}
            return self.embed(texts, prompt_name=name, normalize=True, **asked)

        def classify(
            inputs: Sequence[Input], read: Callable[[bytes], ScoringOutput]
        ) -> list[PooledRequestOutput[ScoringOutput]]:
            return self._pool(inputs, "classify", read, use_tqdm)

        [model] = self._engine.adapters.for_prompts(1, lora_request, adapter)
        pooler = self._engine.pooler_of(model.name)
        return score_pairs(pairs, pooler, model, PairTools(embed, classify, self._run_reads))

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        adapter: str | None = None,
        **others: Any,
    ) -> list[PooledRequestOutput[PoolingOutput]]:
        """Return embeddings or class probabilities as numpy arrays; vLLM returns tensors.

        Args:
            pooling_task: ``embed`` or ``classify``; by default the task that the model supports.
            others: vLLM's further parameters; ``vllm_classes.toml`` describes the effect of each.

        Raises:
            RequestError: a prompt or parameter is out of bounds, or the model does not support the task.
        """
        check_values("LLM.encode", others)
        chosen: dict[str, Any] = {"use_tqdm": use_tqdm, "lora_request": lora_request, "adapter": adapter}
        chosen["pooling_params"] = pooling_params
        if read_pooling_task(pooling_task, lambda: self._default_task(prompts, lora_request, adapter)) == "embed":
            return [as_array(each, each.outputs.embedding) for each in self.embed(prompts, **chosen)]
        return [as_array(each, each.outputs.probs) for each in self.classify(prompts, **chosen)]

    def _default_task(
        self, prompts: PromptType | Sequence[PromptType], lora_request: Loras, adapter: str | None
    ) -> PoolingTask:
        """Return ``classify`` if each prompt's model has a classification head, of its adapter or its own."""
        given = self._engine.adapters.for_prompts(len(listed_prompts(prompts)), lora_request, adapter)
        return "classify" if all(self._engine.pooler_of(each.name).labels for each in given) else "embed"

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Loras = None,
        adapter: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        **others: Any,
    ) -> list[PooledRequestOutput[EmbeddingOutput]]:
        """Return the embeddings of texts: hidden states, pooled as the checkpoint defines.

        Args:
            pooling_params: parameters in vLLM's form: ``dimensions`` and ``normalize``.
            dimensions: number of leading values to return; they are normalized to length 1 again.
            normalize: whether embeddings have length 1; by default as the checkpoint defines.
            prompt_name: name of the checkpoint's prompt that is put before each text; by default the checkpoint's
                default prompt.
            others: vLLM's further parameters; ``vllm_classes.toml`` describes the effect of each.

        Raises:
            RequestError: a prompt or parameter is out of bounds, or the model offers no embeddings.
        """
        check_values("LLM.embed", others)
        pooler = self._engine.pooler
        listed = embedding_prompts(pooler, prompts, prompt_name)
        params = read_pooling_params(pooling_params, len(listed))
        dimensions = params.dimensions if dimensions is None else dimensions
        read = embedding_reader(pooler, dimensions, params.normalize if normalize is None else normalize)
        inputs = self._engine.adapters.inputs(listed, lora_request=lora_request, adapter=adapter)
        left_out = [prompt_tokens(pooler, prompt_name, *each) for each in zip(listed, inputs, strict=True)]
        return self._pool(inputs, "embed", read, bool(use_tqdm), left_out)

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        adapter: str | None = None,
        **others: Any,
    ) -> list[PooledRequestOutput[ClassificationOutput]]:
        """Return the probability of each class of the model's classification head, for each text.

        Args:
            others: vLLM's further parameters; ``vllm_classes.toml`` describes the effect of each.

        Raises:
            RequestError: a prompt is out of bounds, or the model has no classification head.
        """
        check_values("LLM.classify", others)
        inputs = self._engine.adapters.inputs(prompts, lora_request=lora_request, adapter=adapter)
        read_pooling_params(pooling_params, len(inputs))
        return self._pool(inputs, "classify", class_reader(self._engine.pooler), bool(use_tqdm))

    def begin(
        self,
        tokens: Sequence[int],
        params: AnyParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        grammar: GrammarSpec | None = None,
        adapter: str | None = None,
        session: str = "",
        session_seconds: float | None = None,
        pin_seconds: float = 0.0,
        on_delta: Callable[[TextDelta], None] | None = None,
    ) -> RunningRequest:
        """Begin a request in addition to the running ones. ``step`` advances all of them.

        Args:
            tokens: the prompt.
            session: name of a session. The KV of a session's last request is evicted last from the prefix cache.
            session_seconds: seconds after the answer for which the session's KV is kept this way, 300 by default. With
                0, the KV is evicted first.
            pin_seconds: seconds for which the prompt is pinned in the prefix cache.
            on_delta: callback for each delta. It is called after the step that generated the delta, in ``step`` and in
                every other call that runs steps. ``step`` raises the callback's exceptions after all deltas of the step
                have reached their requests.

        Raises:
            RequestError: the prompt or a parameter is out of bounds.
        """
        [given] = self._engine.adapters.inputs(prompt_token_ids=[tokens], adapter=adapter)
        request = self._requests.request(given, params, CallOptions(stop, None, grammar))
        kept = replace(request, session=session, pin_seconds=pin_seconds)
        if session_seconds is not None:
            kept = replace(kept, session_seconds=session_seconds)
        request = given.adapter.model.limits.check(kept)
        return self._engine.begin(given, request, self._requests.builder(given, request), on_delta)

    def begin_prompt(
        self, prompt: PromptType, params: AnyParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> RunningRequest:
        """Begin a request, like ``begin``, for one prompt in any form that ``generate`` accepts.

        Raises:
            RequestError: the prompt or a parameter is out of bounds.
        """
        [given] = self._engine.adapters.inputs([prompt], lora_request=lora_request)
        request = given.adapter.model.limits.check(self._requests.request(given, params, CallOptions()))
        return self._engine.begin(given, request, self._requests.builder(given, request))

    def step(self) -> bool:
        """Compute one step of all running requests. Returns whether any of them still runs.

        Raises:
            Exception: the first exception that a callback raised in this step, or in another call since the last step.
        """
        return self._engine.step()

    def abort(self, running: RunningRequest) -> None:
        """Abort a request. It gets no more deltas, and its ``output`` raises RequestError unless it has ended."""
        self._engine.abort(running)

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load a LoRA adapter under a name. Needs ``enable_lora=True``. Running requests continue meanwhile.

        Args:
            path: folder in PEFT format, ``org/name`` on the Hub, or a URI: ``hf://``, ``s3://``, ``https://``, ``file://``.
            replace: whether the name may be in use.

        Raises:
            RequestError: the adapter cannot be loaded.
            AdapterUnavailable: the adapter's source does not answer.
        """
        self._engine.load_adapter(name, path, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises UnknownModel if no adapter has the name."""
        self._engine.unload_adapter(name)

    def close(self) -> None:
        """End the engine's threads and the processes that compile grammars. Running requests fail with EngineDead.

        In a fork of the process that made the LLM, nothing is ended.
        """
        self._engine.close()

    def _run(
        self,
        inputs: Sequence[Input],
        params: AnyParams | Sequence[AnyParams] | None,
        options: CallOptions,
        use_tqdm: bool,
        generated: Sequence[array[int]] = (),
    ) -> list[RequestOutput]:
        """Check all requests, then run them. Raises RequestError.

        Args:
            generated: for each input, the first tokens of its answer that are known already; empty for none.
        """
        requests = [
            given.adapter.model.limits.check(replace(self._requests.request(given, one, options), generated=known))
            for given, one, known in zip(
                inputs, one_for_each(params, len(inputs)), generated or [array("i")] * len(inputs), strict=True
            )
        ]
        builders = [self._requests.builder(given, request) for given, request in zip(inputs, requests, strict=True)]
        self._engine.run(inputs, requests, builders, use_tqdm)
        return [builder.build() for builder in builders]

    def _pool(
        self,
        inputs: Sequence[Input],
        pooling: Literal["embed", "classify"],
        read: Callable[[bytes], P],
        use_tqdm: bool,
        left_out: Sequence[int] = (),
    ) -> list[PooledRequestOutput[P]]:
        """Check all prompts, then pool them.

        For each prompt, the first ``left_out`` tokens are not pooled. Raises RequestError.
        """
        check_lengths(self._engine.pooler, inputs)
        requests = [
            given.adapter.model.limits.check(self._requests.pooled(given, pooling, first))
            for given, first in zip(inputs, left_out or [0] * len(inputs), strict=True)
        ]
        builders = [self._requests.builder(given, request) for given, request in zip(inputs, requests, strict=True)]
        self._engine.run(inputs, requests, builders, use_tqdm)
        built = [builder.build() for builder in builders]
        return [
            PooledRequestOutput(each.request_id, read(builder.pooled), each.prompt_token_ids, each.num_cached_tokens)
            for each, builder in zip(built, builders, strict=True)
        ]

    def _run_reads(self, inputs: Sequence[Input], params: Sequence[AnyParams]) -> list[RequestOutput]:
        return self._run(inputs, params, CallOptions(), False)

    def prefetch(
        self, prompts: PromptType | Sequence[PromptType], *, lora_request: LoRARequest | None = None
    ) -> list[int]:
        """Load the KV of prompts into the prefix cache before the prompts are requested, by computing it or from the
        other tiers.

        Returns:
            For each prompt, the number of its tokens that were already cached.

        Raises:
            RequestError: a prompt is out of bounds.
        """
        inputs = self._engine.adapters.inputs(prompts, lora_request=lora_request)
        outputs = self._run(inputs, SamplingParams(max_tokens=1, temperature=0.0), CallOptions(), False)
        return [output.num_cached_tokens or 0 for output in outputs]

    def release_session(self, session: str) -> bool:
        """End a session of ``begin``.

        KV that no other request has used is then evicted first. Returns False without KV.
        """
        return self._engine.release_session(session)

    def save_prefix(
        self,
        prompt: PromptType,
        path: str | Path,
        *,
        lora_request: LoRARequest | None = None,
        adapter: str | None = None,
    ) -> int:
        """Compute a prompt, and write the KV of its full pages to a file for ``load_prefix``.

        Args:
            prompt: a prompt in any form of ``generate``.
            path: path of the file. An existing file is replaced.
            lora_request, adapter: the adapter with which the prompt is computed.

        Returns:
            Number of tokens whose KV is in the file.

        Raises:
            RequestError: the prompt is out of bounds, or no adapter has the name.
            ConfigError: the KV of this model cannot be saved.
            OSError: the file cannot be written.
        """
        [given] = self._engine.adapters.inputs([prompt], lora_request=lora_request, adapter=adapter)
        self._run([given], SamplingParams(max_tokens=1, temperature=0.0), CallOptions(), False)
        return self._engine.save_prefix(given, Path(path))

    def load_prefix(self, path: str | Path) -> int:
        """Load the KV of a prompt into the prefix cache, from a file that ``save_prefix`` has written.

        Returns:
            Number of tokens whose KV is now cached. It is 0 for a file of another model, number format or page size,
            and smaller than the number saved if the file is damaged or the pool is full; requests then compute the
            missing KV.

        Raises:
            ConfigError: the KV of this model cannot be saved.
            OSError: the file cannot be read.
        """
        return self._engine.load_prefix(Path(path))

    def save_session(self, running: RunningRequest, path: str | Path) -> int:
        """Pause a request of ``begin``: write the request and the KV of its tokens to a file for ``load_session``.

        After ``load_session``, in this process or another one, the request continues with the tokens that it would have
        generated here. In this ``LLM`` the request ends, and its ``output`` raises RequestError.

        Returns:
            Number of tokens whose KV is in the file.

        Raises:
            RequestError: the request has ended, has several answers, wants logprobs or field probabilities, or is
                waiting for its grammar or adapter.
            ConfigError: the KV of this model cannot be saved.
            OSError: the file cannot be written; the request then continues here.
        """
        return self._engine.save_session(running, Path(path))

    def load_session(
        self, path: str | Path, *, on_delta: Callable[[TextDelta], None] | None = None
    ) -> RunningRequest | None:
        """Continue a request that ``save_session`` has paused, in addition to the running requests.

        Args:
            on_delta: callback as in ``begin``. It first gets the tokens from before the pause.

        Returns:
            The request; None if the file is damaged or belongs to another base model, or if the request's adapter is
            not loaded with the same name and content. KV of another number format is computed again.

        Raises:
            RequestError: the request exceeds the limits of this LLM.
            ConfigError: the KV of this model cannot be saved.
            OSError: the file cannot be read.
        """
        saved = self._engine.load_session(Path(path))
        if saved is None:
            return None
        [given] = self._engine.adapters.inputs(prompt_token_ids=[saved.request.tokens], adapter=saved.request.adapter)
        request = given.adapter.model.limits.check(replace(saved.request, generated=saved.generated))
        return self._engine.begin(given, request, self._requests.builder(given, request), on_delta, saved.generated)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Remove all cached KV that no running request uses, from all tiers. Returns True. The arguments are vLLM's."""
        self._engine.reset_cache()
        return True

    def __getattr__(self, name: str) -> Any:
        """Handle a vLLM method that this class lacks: accept it without effect, or raise the table's error.

        The table is ``vllm_classes.toml``.
        """
        check_offered("LLM", name)
        return lambda *args, **kwargs: None


def _scores_of(output: RequestOutput) -> dict[int, float]:
    """Return the logprobs of the likeliest tokens at an answer's first position."""
    assert output.outputs[0].logprobs is not None
    return {token: score.logprob for token, score in output.outputs[0].logprobs[0].items()}
