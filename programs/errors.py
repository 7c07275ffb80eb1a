"""Errors of programs: a failed call, and a failed step with its branch."""

from __future__ import annotations


class CallFailed(Exception):
    """A call of the model has failed. Backends raise this error, and branches convert it to ``ProgramError``."""


class ProgramError(Exception):
    """A step of a program failed.

    Args:
        branch: path of the branch, such as ``root/2``.
        step: the step that failed, such as ``gen 'score'``.
        reason: the cause.
    """

    def __init__(self, branch: str, step: str, reason: str) -> None:
        super().__init__(f"branch {branch}, {step}: {reason}")
        self.branch = branch
        self.step = step
        self.reason = reason
