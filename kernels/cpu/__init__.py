"""Native CPU kernels: C++ compiled when the package is built, or at the first start, called through ctypes."""
