"""Native CPU kernels: C++ compiled on the machine that runs it, called through ctypes."""
