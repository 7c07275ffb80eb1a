"""The text of a custom tool's input out of its JSON, cut anywhere."""

from __future__ import annotations

import pytest

from rootgraft.api.structured.input_reader import InputReader


@pytest.mark.parametrize(
    ("spelled", "text"),
    [
        ('a\\"\\\\\\n\\u00e9 \\ud83d\\ude00', 'a"\\\né \U0001f600'),
        ("\\ud83d\\ud83d\\ude00", "\ufffd\U0001f600"),
        ("\\ud83d\\ud83d\\ud83d x", "\ufffd\ufffd\ufffd x"),
        ("\\ud83d\\u0061\\ude00", "\ufffda\ufffd"),
        ("\\ud83d\\\\", "\ufffd\\"),
        ("\\ud83d", "\ufffd"),
    ],
)
def test_pieces_join_to_the_text_of_the_whole(spelled: str, text: str) -> None:
    written = f'{{"input": "{spelled}"}}'
    assert InputReader().read(written) == text
    for size in range(1, 14):
        reader = InputReader()
        assert "".join(reader.read(written[at : at + size]) for at in range(0, len(written), size)) == text
