"""The offline engine, ``LLM``, and what it returns."""
