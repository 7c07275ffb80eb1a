"""Anthropic's messages API: request models, translation to chats, and responses as content blocks and events."""
