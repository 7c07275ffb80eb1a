"""Command line ``rootgraft``: its commands and options, clients of a server, and benchmarks."""
