"""Terminal chat with a server: input, slash commands, conversation, Markdown."""
