"""Responses API: translates responses to chats, builds streamed output items, and loads stored conversations."""
