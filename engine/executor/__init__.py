"""Execution of a step on the device: worker, model runner, input builder, CUDA graphs and CPU graphs."""
