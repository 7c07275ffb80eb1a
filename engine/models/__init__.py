"""The decoder: layers, rotary embedding, forward inputs, the KV pool."""
