from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.ipc import Channel, FrameReader, frame


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 40))
def test_frames_come_out_as_they_went_in_however_they_are_cut(payloads, cut):
    stream = b"".join(map(frame, payloads))
    reader = FrameReader()
    out = [p for i in range(0, len(stream), cut) for p in reader.feed(stream[i : i + cut])]
    assert out == payloads


def test_an_absurd_length_is_refused():
    with pytest.raises(ValueError, match="longer than"):
        FrameReader().feed(b"\xff\xff\xff\xff")


def test_a_channel_keeps_what_a_slow_reader_has_not_taken():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        payload = bytes(1 << 20)
        for _ in range(8):
            channel.send(payload)  # far beyond the socket's buffer, and returns at once
        reader, received = FrameReader(), []
        theirs.setblocking(False)
        while len(received) < 8:
            channel.receive(0.0)
            try:
                received += reader.feed(theirs.recv(1 << 16))
            except BlockingIOError:
                continue
        assert received == [payload] * 8


def test_the_end_of_the_other_side_is_an_error():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(ConnectionError):
        Channel(ours).receive(1.0)
