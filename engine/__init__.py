"""Engine: from messages to tokens. See ``docs/architecture.md``."""
