"""Tensor ops: one public function per op in ``ops``, an fp32 oracle in ``reference``, kernels for CPU and GPU."""
