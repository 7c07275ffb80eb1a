"""Uploads under way: their bytes are asked for before they are spooled, by tenant and in all."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rootgraft.api.errors import HTTPError
from rootgraft.api.storage.file_store import FORM_BYTES, MOST_UPLOADS, FileStore, StoredFile, Upload

MB = 1 << 20


def send(upload: Upload, size: int) -> int:
    """Send a file in pieces; how much was taken before it was refused."""
    taken = 0
    while taken < size:
        try:
            upload.take(MB)
        except HTTPError:
            return taken
        taken += MB
    return taken


def test_uploads_of_one_tenant_leave_half_to_others(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 1 << 40, 10 * MB)
    many = [store.begin_upload("a") for _ in range(24)]
    assert sum(send(each, 10 * MB) for each in many) == MOST_UPLOADS * 10 * MB / 2
    with pytest.raises(HTTPError) as error:
        many[-1].take(MB)
    assert (error.value.status_code, error.value.code) == (429, "rate_limit_exceeded")
    assert send(store.begin_upload("b"), 10 * MB) == 10 * MB
    for each in many:
        each.close()
    assert store.uploads.held("a") == 0 and send(store.begin_upload("a"), 10 * MB) == 10 * MB


def test_all_uploads_together_are_bounded(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 1 << 40, 10 * MB)
    assert sum(send(store.begin_upload(""), 10 * MB) for _ in range(24)) == MOST_UPLOADS * 10 * MB
    with pytest.raises(HTTPError) as error:
        store.begin_upload("").expect(1)
    assert error.value.status_code == 503 and (error.value.headers or {})["retry-after"]


def test_uploads_count_with_the_files_that_are_kept(tmp_path: Path) -> None:
    """Of 16 MB a tenant has half, and a form may be a little longer than its file."""
    store = FileStore(tmp_path, 16 * MB, 8 * MB)
    store.add(store.new("a", "x", "batch", 4 * MB, None))
    upload = store.begin_upload("a")
    upload.expect(4 * MB + FORM_BYTES)
    with pytest.raises(HTTPError) as error:
        upload.expect(4 * MB + FORM_BYTES + 1)
    assert (error.value.status_code, error.value.code) == (413, "storage_full")
    assert send(upload, 8 * MB) == 4 * MB
    upload.settle(4 * MB)
    with pytest.raises(HTTPError):
        upload.settle(4 * MB + 1)
    upload.close()
    assert store.uploads.total == 0


@settings(max_examples=60, deadline=None)
@example([("a", 2, 5, True), ("a", 1, 1, True), ("a", 5, 2, False), ("a", 9, 5, True)])
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 5), st.booleans()), max_size=40))
def test_sums_are_those_of_the_files(steps: list[tuple[str, int, int, bool]]) -> None:
    """Room is asked for with each piece, so sums are kept: they are those of the files that are there, and in use.

    In the example a file takes the place of one of its id that is past its expiry and was in use.
    """
    now, in_use = [0.0], set[str]()
    with TemporaryDirectory() as folder:
        store = FileStore(Path(folder), 10**9, 10 * MB, lambda file: file.id in in_use, lambda: now[0])
        made: list[StoredFile] = []
        for owner, size, seconds, flag in steps:
            if flag or not made:
                file = store.new(
                    owner, "x", "batch", size, seconds or None, made[-1].id if made and size == 9 else None
                )
                store.add(file)
                made = [each for each in made if each.id != file.id] + [file]
                in_use ^= {file.id} if size % 2 else set()
            elif size < 5:
                store.delete(made.pop(size % len(made)))
            else:
                now[0] += seconds
                in_use -= {made[0].id}
            made = [each for each in made if each.expires_at > now[0] or each.id in in_use]
            assert sorted(file.id for name in "ab" for file in store.of(name)) == sorted(each.id for each in made)
            assert store.num_bytes == sum(each.bytes for each in made)
            for name in "ab":
                own = sum(each.bytes for each in made if each.owner == name)
                room = 10**9 // 2 - own
                store.check_room(name, room)
                with pytest.raises(HTTPError):
                    store.check_room(name, room + 1)
