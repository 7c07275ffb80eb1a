"""OpenAI's responses: another protocol around what chat completions do, and a memory of past ones."""
