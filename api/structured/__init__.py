"""Structured output: builds the grammar of an answer, parses tool calls and reasoning, validates finished answers."""
