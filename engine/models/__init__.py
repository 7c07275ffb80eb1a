"""The decoder: layers, rotary embedding, forward inputs, KV pool."""
