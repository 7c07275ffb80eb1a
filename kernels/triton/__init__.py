"""The GPU's kernels, in Triton. ``kernels.ops`` and its siblings choose them for tensors on a CUDA device.

Every module of kernels has the same three parts: the kernels; a function for each op, which makes ``Launch`` objects
and runs them; and ``variants()``, which yields under a name each ``Launch`` of another compilation that the op can
choose. No launch reads a value back from the device, so that all of them can be captured in a CUDA graph.
"""
