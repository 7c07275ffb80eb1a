"""KV pages: the allocator and the prefix cache over the radix tree. No torch."""
