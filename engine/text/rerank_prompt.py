"""Rerank prompt: the conversation on which Qwen3-Reranker was trained.

It asks whether a document meets a query, yes or no.
"""

from __future__ import annotations

from typing import Any

ANSWERS = ("yes", "no")
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


def rerank_messages(query: str, document: str, instruction: str) -> list[dict[str, Any]]:
    """Return the messages of the conversation. ``instruction`` describes which documents count as relevant."""
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]
