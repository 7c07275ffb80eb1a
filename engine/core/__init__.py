"""The engine core: the only place where the control plane (ints) and the device (tensors) meet."""
