"""Profiling of engine steps for ``rootgraft bench step``."""
