"""Ops on tensors: one public function per op in ``ops``, an fp32 oracle in ``reference``."""
