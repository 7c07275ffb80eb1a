"""Programs of many model calls over shared prompts: conversations that fork, generate, select and join.

A program begins with a ``Session``, over HTTP or on the offline ``LLM``; see ``docs/guide/programs.md``.
"""

from .branch import Branch, Fork
from .errors import ProgramError
from .session import Session
from .token_report import Report

__all__ = ["Branch", "Fork", "ProgramError", "Report", "Session"]
