"""What goes wrong in a program, with the branch in which it did."""

from __future__ import annotations


class CallFailed(Exception):
    """A call to the model did not succeed. Backends raise it; branches turn it into ``ProgramError``."""


class ProgramError(Exception):
    """A step of a program failed.

    Args:
        branch: the path of the branch, such as ``root/2``.
        step: what it was about to do, such as ``gen 'score'``.
        reason: what is wrong.
    """

    def __init__(self, branch: str, step: str, reason: str) -> None:
        super().__init__(f"branch {branch}, {step}: {reason}")
        self.branch = branch
        self.step = step
        self.reason = reason
