"""Anthropic's messages API: request models, translation to chats, answers as content blocks and events."""
