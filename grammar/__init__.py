"""Grammars for structured output: schemas, expressions and tags, compiled to token masks."""
