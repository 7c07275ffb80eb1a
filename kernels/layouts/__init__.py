"""Memory layouts and argument records shared by ops and kernels."""
