"""The descriptors beside the code are those of the ``.proto`` files."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import descriptor_pb2

from rootgraft.api.rpc import messages


def test_the_descriptors_are_current(tmp_path: Path) -> None:
    messages.compile_protos(tmp_path / "made")
    made = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "made").read_bytes())
    kept = descriptor_pb2.FileDescriptorSet.FromString((Path(messages.__file__).parent / "messages.binpb").read_bytes())
    assert made == kept, "run python -m rootgraft.api.rpc.messages"
