"""Programs of many calls over shared prompts: a conversation that forks, generates, selects and joins.

``Session`` is the way in, over HTTP or on the offline ``LLM``; see ``docs/programs.md``.
"""

from .branch import Branch, Fork
from .errors import ProgramError
from .session import Session
from .token_report import Report

__all__ = ["Branch", "Fork", "ProgramError", "Report", "Session"]
