"""Programs of many calls over shared prompts: a conversation that forks, generates, selects and joins.

``Session`` is the way in, over HTTP or on the offline ``LLM``; see ``docs/programs.md``.
"""

from programs.branch import Branch, Fork
from programs.errors import ProgramError
from programs.report import Report
from programs.session import Session

__all__ = ["Branch", "Fork", "ProgramError", "Report", "Session"]
