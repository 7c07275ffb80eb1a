"""Processes whose parent was killed end, whatever they are doing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from support.machine.import_graph import ROOT
from support.machine.waits import HANG_SECONDS

from rootgraft.kernels.cpu.child_command import ending_with_parent

HANGS = {
    "Python": "while True: pass",
    "native code that holds the lock": "import re; re.match('(a+)+x', 'a' * 60)",
    "a sleep": "import time; time.sleep(1000)",
}

CHILD = """
import sys
from rootgraft.grammar.parent_death import end_with_parent
end_with_parent(int(sys.argv[2]))
print("ready", flush=True)
exec(sys.argv[1])
"""

PARENT_OF_ONE = """
import os, subprocess, sys
command = [sys.executable, "-P", "-c", *sys.argv[1:3], str(os.getpid())]
child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "ready\\n"
print(child.pid, flush=True)
child.wait()
"""

LATE_CHILD = """
import os, sys
sys.stdin.read()  # until the parent is gone
from rootgraft.grammar.parent_death import end_with_parent
end_with_parent(int(sys.argv[1]))
print("lives on", flush=True)
"""

PARENT_OF_A_LATE_ONE = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-P", "-c", sys.argv[1], str(os.getpid())], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""

PARENT_OF_A_COMMAND = """
import subprocess, sys
from rootgraft.kernels.cpu.child_command import ending_with_parent
script = "import subprocess, sys\\n" \
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\\n" \
    "print(child.pid, flush=True)\\nchild.wait()"
command = ending_with_parent([sys.executable, "-c", script, sys.argv[1]])
process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
print(process.pid, flush=True)
process.wait()
"""

STARTERS = {
    "api/cli/chat/run_command.py": "end_with_parent",
    "api/cli/run_batch.py": "end_with_parent",
    "api/gateways/main_spawn.py": "end_with_parent of api/http/gateway_process.py",
    "engine/checkpoint/locate.py": "ending_with_parent",
    "engine/executor/followers.py": "end_with_parent of engine/executor/follower_process.py",
    "engine/serving/engine_spawn.py": "end_with_parent of engine/core/engine_process.py",
    "engine/serving/fork_server.py": "end_with_parent of engine/core/engine_template.py",
    "grammar/compile/worker_handle.py": "end_with_parent of grammar/compile/compile_worker.py",
    "kernels/cpu/build.py": "ending_with_parent",
}
"""What starts processes that live on, and what ends these with it: a call there, or of another module."""

TEMPLATE = """
import socket, sys, os
from rootgraft.engine.serving.fork_server import serve_forks

def run(one, other):
    os.write(one, b"ready")
    exec(sys.argv[3])

sys.exit(serve_forks(socket.socket(fileno=int(sys.argv[1])), run))
"""

PARENT_OF_FORKS = """
import asyncio, os, sys
from rootgraft.engine.serving import fork_server

async def main():
    server = fork_server.ForkServer("template", sys.argv[1])
    await server.start()
    reader, writer = os.pipe()
    processes = [server.fork((writer, writer)) for _ in range(2)]
    while os.read(reader, 5) != b"ready":
        pass
    print(*(process.pid for process in processes), server._process.pid, flush=True)
    if sys.argv[2] == "close":
        server.close()
    os.read(0, 1)
    await asyncio.sleep(1000)

asyncio.run(main())
"""

LIVES = """
import os, sys
from rootgraft.engine.core.engine_process import end_orphan
from rootgraft.engine.core.liveness_thread import LivenessThread
LivenessThread(int(sys.argv[1]), end_orphan)
print("ready", flush=True)
exec(sys.argv[2])
"""

THREAD_THAT_STAYS = """
import threading, time
from rootgraft.engine.end_limit import EndLimit
threading.Thread(target=time.sleep, args=(1000,)).start()
EndLimit(0.1, 7, "What is tested")
"""


def wait_for_the_end_of(*pids: int) -> None:
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout=HANG_SECONDS)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_a_child_is_killed_with_its_parent(hang: str) -> None:
    command = [sys.executable, "-P", "-c", PARENT_OF_ONE, CHILD, hang]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        wait_for_the_end_of(child)


def test_a_child_that_asks_after_its_parents_death_ends() -> None:
    command = [sys.executable, "-P", "-c", PARENT_OF_A_LATE_ONE, LATE_CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        wait_for_the_end_of(child)
        assert parent.stdout.read() == ""


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_a_command_and_what_it_has_started_are_killed_with_their_parent(hang: str) -> None:
    command = [sys.executable, "-P", "-c", PARENT_OF_A_COMMAND, hang]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
        wait_for_the_end_of(*pids)


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_ends_with_its_own_code(code: int) -> None:
    script = f"import sys; print(sys.argv[1]); sys.exit({code})"
    command = ending_with_parent([sys.executable, "-c", script, "a 'b\" c"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.read() == b"a 'b\" c\n"
        assert process.wait(HANG_SECONDS) == code


def test_whatever_starts_a_process_has_it_end_with_itself() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("api", "engine", "fleet", "grammar", "kernels", "lora", "tenancy")
        for path in (ROOT / folder).rglob("*.py")
        if any(word in path.read_text() for word in ("subprocess.Popen(", ").Process(", "os.fork()", "posix_spawn"))
    }
    assert found == STARTERS.keys()
    for starter, how in STARTERS.items():
        call, _, module = how.partition(" of ")
        assert re.search(rf"\b{call}[(,)]", (ROOT / (module or starter)).read_text()), starter


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_forked_processes_end_with_the_one_that_needs_them(hang: str, tmp_path) -> None:
    (tmp_path / "template.py").write_text(TEMPLATE)
    # -P leaves out the working directory, not the path of the environment.
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", PARENT_OF_FORKS, hang, "stay"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3 and all(map(psutil.pid_exists, pids))
        parent.kill()
        wait_for_the_end_of(*pids)


def test_forked_processes_run_on_when_what_they_were_forked_from_is_given_up(tmp_path) -> None:
    (tmp_path / "template.py").write_text(TEMPLATE)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", PARENT_OF_FORKS, HANGS["a sleep"], "close"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        *forked, template = [int(pid) for pid in parent.stdout.readline().split()]
        wait_for_the_end_of(template)
        assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in forked)
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
        parent.kill()


@pytest.mark.parametrize("hang", [HANGS["Python"], HANGS["a sleep"]], ids=["Python", "a sleep"])
def test_an_engine_whose_server_is_gone_ends(hang: str) -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-P", "-c", LIVES, str(writer), hang]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[writer], text=True) as engine:
        os.close(writer)
        assert engine.stdout is not None and engine.stdout.readline() == "ready\n"
        assert os.read(reader, 8)
        os.close(reader)
        assert engine.wait(HANG_SECONDS) == 70


def test_threads_that_stay_keep_no_process() -> None:
    command = [sys.executable, "-P", "-c", THREAD_THAT_STAYS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (7, "What is tested has not ended after 0.1 s: ending the process\n")
