"""Fixtures of this folder: one thread, and the native kernels."""

from __future__ import annotations

from support.kernels.kernel_fixtures import kernels, one_thread

__all__ = ("kernels", "one_thread")
