"""Memory layouts and arguments that ops and kernels share: packed weights, 8-bit KV, adapters, staging."""
