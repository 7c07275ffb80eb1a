"""An engine core with real matchers over a vocabulary of single bytes on the fake device."""

from __future__ import annotations

from array import array

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, Failed, Submit, TokenOut, TokenTexts
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.spec import GrammarSpec
from support.engine.fake_worker import FakeWorker

VOCAB = 258  # 256 bytes, an end token, and one id that is no token
EOS = 256
TEXTS = TokenTexts(array("i", [1] * 256 + [5]), bytes(range(256)) + b"<eos>", (EOS,))


class Structured:
    """An engine, and the text and end of each sequence on it."""

    def __init__(self, num_pages: int = 200, page_size: int = 4, max_num_seqs: int = 4, budget: int = 64) -> None:
        config = EngineConfig(block_size=page_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.worker = FakeWorker(num_pages, page_size, vocab_size=VOCAB, eos=(EOS,))
        self.core = EngineCore(config, self.worker)
        self.core.handle([TEXTS])
        self.texts: dict[int, bytes] = {}
        self.limited: set[int] = set()  # whose answers the budget of tokens has changed
        self.ends: dict[int, Done | Failed] = {}

    def submit(self, number: int, spec: GrammarSpec | None, prompt: bytes = b"p", **params) -> None:
        grammar = spec and (spec.kind.value, spec.content)
        self.texts[number] = b""
        self.core.handle([Submit(number, array("i", list(prompt)), SamplingParams(**params), grammar=grammar)])

    def step(self) -> None:
        for message in self.core.step():
            if isinstance(message, TokenOut):
                self.texts[message.id] += bytes(message.tokens)
                self.limited |= {message.id} if message.is_limited else set()
            else:
                assert message.id not in self.ends
                self.ends[message.id] = message
                self.limited |= {message.id} if isinstance(message, Done) and message.is_limited else set()
        self.core.check()

    def run(self) -> None:
        while self.core.has_work:
            self.step()
