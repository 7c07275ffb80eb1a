"""Ollama's protocol: its bodies as chats and completions of ours, and answers in lines of JSON."""
