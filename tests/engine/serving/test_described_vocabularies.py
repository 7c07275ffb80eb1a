"""Vocabularies of adapters: their bytes are with the engine before a sequence needs them, and not for good."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.messages import ForgetTokens, TokenTexts
from rootgraft.engine.serving.adapter_tokenizers import ServedTokenizer
from rootgraft.engine.serving.described_vocabularies import MOST_IDLE, DescribedVocabularies


@dataclass(frozen=True)
class Served:
    """A tokenizer of which nothing but its vocabulary counts."""

    key: str

    def texts(self) -> Any:
        return cast(TokenTexts, self)


@dataclass
class Receiver:
    """An engine that knows what it was told."""

    known: set[str] = field(default_factory=set)

    def describe_tokens(self, message: Any) -> None:
        if isinstance(message, ForgetTokens):
            self.known.remove(message.vocabulary)
        else:
            assert message.key not in self.known, "told twice"
            self.known.add(message.key)


def use(vocabularies: DescribedVocabularies, key: str, name: str, *ids: int) -> None:
    vocabularies.use(cast(ServedTokenizer, Served(key)), [name], ids)


def test_bytes_go_with_the_last_name_and_the_last_sequence() -> None:
    engine = Receiver()
    vocabularies = DescribedVocabularies(engine)
    use(vocabularies, "wide", "a", 1)
    use(vocabularies, "wide", "b", 2)
    use(vocabularies, "", "plain", 3)
    vocabularies.adapter_changed("a")
    vocabularies.end([1, 2])
    assert engine.known == {"", "wide"}
    use(vocabularies, "wide", "b", 4)
    for name in ("b", "plain"):
        vocabularies.adapter_changed(name)
    assert engine.known == {"", "wide"}
    vocabularies.end([3, 4])
    assert engine.known == {""}


def test_of_idle_ones_those_used_last_stay() -> None:
    engine = Receiver()
    vocabularies = DescribedVocabularies(engine)
    for number in range(MOST_IDLE + 2):
        use(vocabularies, f"v{number}", f"a{number}", number)
    assert len(engine.known) == MOST_IDLE + 2
    use(vocabularies, "v0", "a0", 99)
    vocabularies.end(range(100))
    assert engine.known == {"v0", *(f"v{number}" for number in range(3, MOST_IDLE + 2))}


@given(st.lists(st.tuples(st.sampled_from(["use", "end", "change"]), st.integers(0, 19), st.integers(0, 3))))
def test_what_a_sequence_uses_is_always_there(calls: list[tuple[str, int, int]]) -> None:
    engine, users, number = Receiver(), dict[int, str](), 0
    vocabularies = DescribedVocabularies(engine)
    for call, which, other in calls:
        if call == "use":
            number += 1
            users[number] = f"v{which}"
            use(vocabularies, f"v{which}", f"a{other}", number)
        elif call == "end" and users:
            ended = list(users)[which % len(users)]
            del users[ended]
            vocabularies.end([ended])
        else:
            vocabularies.adapter_changed(f"a{other}")
        assert engine.known >= set(users.values()) and len(engine.known) <= MOST_IDLE + len(set(users.values()))
    vocabularies.end(list(users))
    for other in range(4):
        vocabularies.adapter_changed(f"a{other}")
    assert not engine.known
