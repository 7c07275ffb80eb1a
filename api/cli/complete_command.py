"""``rootgraft complete``: lets a server continue a text."""

from __future__ import annotations

import asyncio
import sys

from ...engine.errors import ConfigError
from .options import CompleteOptions, RemoteOptions, SamplingOptions
from .terminal import PlainOutput, ShownAnswer, connected, sampling_fields, stream_answer, take_any_text


def complete(remote: RemoteOptions, sampling: SamplingOptions, options: CompleteOptions) -> int:
    """Continue one text. Returns the exit code."""
    take_any_text()
    if options.prompt is None and sys.stdin.isatty():
        raise ConfigError("pass the text to complete as an argument or on standard input.")
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    with asyncio.Runner() as runner, connected(runner, remote) as server:
        body = {"prompt": prompt, **sampling_fields(sampling, options.max_tokens)}
        timing = stream_answer(runner, server, "completions", body, ShownAnswer(PlainOutput()))
    if timing.error is not None:
        print(f"rootgraft complete: {timing.message}", file=sys.stderr)
    return 0 if timing.error is None else 1
