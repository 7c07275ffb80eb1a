"""This machine: cores and memory within cgroup limits, CPU, kernels, GPU, installed software. No torch."""
