"""Oracles of kernels, and the interpreter and compiler of the kernels for GPUs."""
