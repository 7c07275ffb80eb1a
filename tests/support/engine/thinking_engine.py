"""An engine core over single bytes and the marks of thoughts, on a device that draws what a script says if it may."""

from __future__ import annotations

from array import array
from typing import Any

from rootgraft.engine.batch import Row, RowResult
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, Failed, Submit, TokenOut, TokenTexts
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.thought_rules import ThoughtRules
from support.engine.fake_worker import FakeWorker, next_token

EXTRA = (b"<eos>", b"<think>", b"</think>", b"</", b"think", b">\n\n", b"\n\n", b"ok", b"> no")
EOS, START, END = 256, 257, 258
VOCAB = 256 + len(EXTRA)
TEXTS = TokenTexts(
    array("i", [1] * 256 + [len(text) for text in EXTRA]), bytes(range(256)) + b"".join(EXTRA), (EOS, START)
)
QWEN = ThoughtRules("<think>", "</think>", is_open=False, newlines=2)
R1 = ThoughtRules("<think>", "</think>", is_open=True, newlines=2)
TEXT_MARKS = ThoughtRules("[[think]]", "[[end]]", is_open=False, newlines=2)


def tokens_of(text: bytes) -> list[int]:
    """Text as tokens: special names are their tokens, all else single bytes."""
    tokens: list[int] = []
    while text:
        name = next((token for token in (EOS, START, END) if text.startswith(EXTRA[token - 256])), None)
        tokens.append(text[0] if name is None else name)
        text = text[1 if name is None else len(EXTRA[name - 256]) :]
    return tokens


def bytes_of(tokens: Any) -> bytes:
    return b"".join(bytes([token]) if token < 256 else EXTRA[token - 256] for token in tokens)


class ScriptedWorker(FakeWorker):
    """Draws the script's token where the mask allows it, else the first allowed one from the hash's on.

    Attributes:
        scripts: tokens after each prompt, by the prompt's first token; its length is that of the prompt.
    """

    def __init__(self, *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self.scripts: dict[int, tuple[int, list[int]]] = {}
        self.firsts: dict[int, int] = {}  # first token of a sequence, by its first page
        self.num_refused = 0

    def run(self, batch: Any, masks: Any = None) -> Any:
        for copy in batch.copies:
            if copy.source in self.firsts:
                self.firsts[copy.target] = self.firsts[copy.source]
        return super().run(batch, masks)

    def _draw(self, row: Row, contents: list[int], first: int) -> RowResult:
        page = self.tables[row.row][0]
        if row.start == 0:
            self.firsts[page] = row.tokens[0]
        num_prompt, script = self.scripts[self.firsts[page]]
        drawn: list[int] = []
        for ahead in range(row.num_positions):
            at = len(contents) - row.num_positions + ahead
            number = row.start + at + 1 - num_prompt
            wanted = script[number] if 0 <= number < len(script) else next_token(contents[at], self.vocab_size)
            allowed = self.allowed.get(first + ahead, range(self.vocab_size))
            if not allowed:
                return RowResult(tuple(drawn), failed=True)
            drawn.append(self.nearest(allowed, wanted, first + ahead))
            self.num_refused += drawn[-1] != wanted
            if ahead < row.num_drafts and drawn[-1] != row.drafts[ahead]:
                break
        return RowResult(tuple(drawn), num_forced=sum(first + i in self.forced for i in range(len(drawn))))


class Thinking:
    """An engine, and the tokens and end of each sequence on it."""

    def __init__(self, num_pages: int = 400, page_size: int = 4, drafts: bool = True, **options: Any) -> None:
        method = "auto" if drafts else "off"
        config = EngineConfig(
            block_size=page_size,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            speculative_config=f'{{"method": "{method}"}}',
        )
        self.worker = ScriptedWorker(num_pages, page_size, vocab_size=VOCAB, eos=(EOS,), **options)
        self.core = EngineCore(config, self.worker)
        self.core.handle([TEXTS])
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Done | Failed] = {}

    def submit(
        self,
        number: int,
        spec: GrammarSpec | None,
        rules: ThoughtRules | None,
        script: bytes | list[int] = b"",
        prompt: bytes = b"",
        **params: Any,
    ) -> None:
        grammar = spec and (spec.kind.value, spec.content)
        tokens = array("i", [number + 1, *prompt])
        wanted = tokens_of(script) if isinstance(script, bytes) else script
        self.worker.scripts[number + 1] = len(tokens), wanted
        self.tokens[number] = []
        self.core.handle([Submit(number, tokens, SamplingParams(**params), grammar=grammar, reasoning=rules)])

    def run(self) -> None:
        while self.core.has_work:
            for message in self.core.step():
                if isinstance(message, TokenOut):
                    self.tokens[message.id] += message.tokens
                else:
                    assert isinstance(message, Done | Failed) and message.id not in self.ends
                    self.ends[message.id] = message
            self.core.check()

    def text(self, number: int) -> bytes:
        return bytes_of(self.tokens[number])
