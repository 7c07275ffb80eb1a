"""Engine core: the step loop. Only here do the control plane (integers) and the device (tensors) meet."""
