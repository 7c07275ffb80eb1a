"""``rootgraft chat``: chat with a served model."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from ....engine.errors import ConfigError
from ..options import ChatOptions, RemoteOptions, SamplingOptions
from ..remote_server import RemoteError, RemoteServer, Timing
from ..terminal import (
    PlainOutput,
    ShownAnswer,
    TextOutput,
    connected,
    in_terminal,
    print_dim,
    sampling_fields,
    stream_answer,
    take_any_text,
)
from .chat_history import ChatHistory
from .question_input import questions
from .slash_commands import ChatEnd, ChatSession, run_slash_command

_MOST_NAMES = 10


def chat(remote: RemoteOptions, sampling: SamplingOptions, options: ChatOptions) -> int:
    """Chat with a server until the end of the input: see ``hold_chat``."""
    return hold_chat(remote, sampling, options, "rootgraft chat")


def hold_chat(remote: RemoteOptions, sampling: SamplingOptions, options: ChatOptions, command: str) -> int:
    """Chat until the end of the input. Ctrl-C stops an answer, Ctrl-D ends the chat.

    Returns the exit code: 1 if an answer or a command failed and no terminal showed the error.

    Args:
        command: the command that the user has given, which errors name.

    Raises:
        RemoteError: the server is not reachable.
    """
    take_any_text()
    conversation = ChatHistory(options.system, sampling_fields(sampling, options.max_tokens))
    with asyncio.Runner() as runner, connected(runner, remote) as server:
        return _ChatLoop(runner, server, conversation, command).run()


class _ChatLoop:
    """The chat with one server: reads questions and commands, prints answers."""

    def __init__(self, runner: asyncio.Runner, server: RemoteServer, conversation: ChatHistory, command: str) -> None:
        self._runner = runner
        self._server = server
        self._conversation = conversation
        self._command = command
        self._session = ChatSession(conversation, lambda: server.model, self._models, self._take_model)
        self._has_failed = False

    def run(self) -> int:
        """Answer questions until the end of the input. Returns the exit code."""
        if in_terminal():
            print_dim(f"{self._server.model}. Ctrl-C stops an answer, Ctrl-D quits. /help lists commands.")
            self._warn_of_unlisted()
        try:
            for line in questions(self._runner):
                self._take(line)
        except ChatEnd:
            pass
        return 1 if self._has_failed and not in_terminal() else 0

    def _take(self, line: str) -> None:
        try:
            told = run_slash_command(line, self._session)
        except (ConfigError, RemoteError) as error:
            self._fail(str(error))
            return
        if told is None:
            self._ask(line)
        elif told:
            print_dim(told)

    def _ask(self, question: str) -> None:
        """Answer a question. A failed question is removed; the oldest turns are dropped if the context is full."""
        files = self._conversation.files
        self._conversation.ask(question)
        answer = ShownAnswer(self._output())
        try:
            timing = self._stream(answer)
        except KeyboardInterrupt:
            print_dim("(stopped)")
            if answer.text:
                self._conversation.answer(answer.text)
            else:
                self._conversation.take_back()
            return
        if timing.error is None:
            self._conversation.answer(answer.text)
            return
        self._conversation.take_back()
        self._conversation.files = files
        self._fail(timing.message or timing.error)
        if in_terminal():
            self._tell_way_out(timing.error)

    def _tell_way_out(self, error: str) -> None:
        """Print that the question was left out. If the server refused it, print how to reset settings and turns."""
        print_dim("The question was removed from the conversation.")
        if error != "HTTP 400":
            return
        if self._conversation.settings:
            sent = ", ".join(self._conversation.settings)
            print_dim(f"It was sent with these settings: {sent}. /set NAME without a value removes one.")
        if self._conversation.turns:
            print_dim("/clear starts a new conversation.")

    def _stream(self, answer: ShownAnswer) -> Timing:
        """Show the answer to the last question, after dropping the oldest turns that do not fit the context."""
        dropped = 0
        while True:
            body = self._conversation.body()
            timing = stream_answer(self._runner, self._server, "chat/completions", body, answer)
            if timing.code != "context_length_exceeded" or not self._conversation.drop_oldest():
                break
            dropped += 1
        if dropped and timing.error is None:
            turns = "question was" if dropped == 1 else f"{dropped} questions were"
            print_dim(f"The context is full: the oldest {turns} left out of the request, answers included.")
        if timing.error is None and timing.finish == "length":
            is_set = "max_tokens" in self._conversation.settings
            more = (
                "/set max_tokens N raises the limit." if is_set else "/clear starts a new conversation with more room."
            )
            print_dim(f"The answer was cut off after {timing.completion} tokens, its limit. {more}")
        return timing

    def _output(self) -> TextOutput:
        if not in_terminal():
            return PlainOutput()
        from .markdown_output import best_output

        return best_output()

    def _fail(self, message: str) -> None:
        self._has_failed = True
        print(f"{self._command}: {message}", file=sys.stderr)

    def _models(self) -> list[str]:
        return [str(each["id"]) for each in self._runner.run(self._server.get("models"))["data"]]

    def _take_model(self, name: str) -> None:
        self._server.model = name
        self._warn_of_unlisted()

    def _warn_of_unlisted(self) -> None:
        """Warn if the server does not list the model.

        This is not an error, because some adapters are loaded on request.
        """
        with suppress(RemoteError):
            if (model := self._server.model) not in (names := self._models()):
                shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
                print_dim(f"The server has no model {model}. It has {shown}. /model NAME selects another.")
