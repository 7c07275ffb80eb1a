"""Commands of other programs that end with this process, even if it is killed: compilers, downloads."""

from __future__ import annotations

from collections.abc import Sequence

# The standard input is a pipe from this process. It closes when this process ends, which the script notices. The
# kernel's signal for the death of a parent would reach only the command, not the processes that it has started, such as
# those of a compiler's driver.
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
    """Return a command that runs ``command`` until it or this process ends, and then kills all its child processes.

    It must be started with ``stdin=subprocess.PIPE`` and ``start_new_session=True``. Its exit code is that of
    ``command``, or 128 plus the number of the signal that killed it.
    """
    return ["/bin/sh", "-c", _SCRIPT, "sh", *command]
