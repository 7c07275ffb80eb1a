"""Offline inference without a server: the ``LLM`` and ``AsyncLLM`` classes, their parameters and their outputs."""
