"""Commands of other programs that end with this process, also when it is killed: compilers, downloads."""

from __future__ import annotations

from collections.abc import Sequence

# The standard input is a pipe of this process, whose end is seen there as its end. The kernel's signal of a parent's
# death would reach the command alone, and not what that has started in turn, as a compiler's driver does.
_SCRIPT = """
exec 3<&0 </dev/null
"$@" 3<&- &
command=$!
{ read -r _ <&3; kill -KILL 0; } &
watch=$!
wait "$command"
code=$?
kill -KILL "$watch"
exit "$code"
"""


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return the command that runs one until this process ends, when all that it has started is killed too.

    It must be started with ``stdin=subprocess.PIPE`` and ``start_new_session=True``, and ends with the command's exit
    code: 128 and the number of the signal that has killed it.
    """
    return ["/bin/sh", "-c", _SCRIPT, "sh", *command]
