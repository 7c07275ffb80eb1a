"""What this machine has: cores and memory within cgroup limits, CPU, kernels, GPU, installed software. No torch."""
