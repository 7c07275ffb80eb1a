"""Command line ``rootgraft``: commands, options, clients of a server, benchmarks."""
