"""The command line ``rootgraft``."""
