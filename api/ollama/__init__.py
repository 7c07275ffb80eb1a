"""Ollama's protocol: translates its bodies to chats and completions, and builds responses as lines of JSON."""
