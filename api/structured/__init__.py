"""Structured output: the grammar of an answer, tool calls and their parser, and the check of finished answers."""
