"""Execution of a step on the device: worker, model runner, CUDA graphs and their CPU counterpart."""
