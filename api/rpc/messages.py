"""Messages: classes of the protobuf messages, created at import from the descriptors in ``messages.binpb``.

``python -m rootgraft.api.rpc.messages`` has protoc write this file from the ``.proto`` files. Python modules generated
by protoc are not used, because they require a protobuf runtime that is at least as new as the compiler.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FOLDER = Path(__file__).parent
_FILE = _FOLDER / "messages.binpb"
PROTOS = ("generation.proto", "inference.proto")


@cache
def pool() -> Any:
    """Return the descriptors of all messages and services."""
    found = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(_FILE.read_bytes()).file:
        found.Add(file)
    return found


@cache
def message(name: str) -> Any:
    """Return the class of a message by its full name."""
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(name))


def compile_protos(output: Path) -> None:
    """Write the descriptors of the ``.proto`` files. Needs the package ``grpcio-tools``."""
    command = [sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{_FOLDER}", f"--descriptor_set_out={output}"]
    subprocess.run([*command, *PROTOS], check=True)


if __name__ == "__main__":
    compile_protos(_FILE)
