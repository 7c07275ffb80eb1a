"""Access: API keys, callers, rate limits, overload protection and admission of requests."""
