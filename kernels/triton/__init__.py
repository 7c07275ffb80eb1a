"""GPU kernels in Triton, used by ``kernels.ops`` and its siblings for tensors on a CUDA device.

A module of kernels has three parts: the kernels; a function for each op, which builds and runs ``Launch`` objects; and
``variants()``, which yields a named ``Launch`` for each variant of the op that is compiled. No launch reads a value
back from the device, so all launches can be captured in a CUDA graph.
"""
