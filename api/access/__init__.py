"""Access: API keys, callers, rate limits, overload, admission of requests."""
