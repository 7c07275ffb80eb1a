"""The responses API: translation to chat completions, streamed output items, stored conversations."""
