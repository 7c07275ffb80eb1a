"""The engine: from messages to tokens. See ``docs/architecture.md`` for its floors."""
