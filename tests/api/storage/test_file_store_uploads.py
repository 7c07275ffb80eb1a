"""Uploads under way: their bytes are asked for before they are spooled, by tenant and in all."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootgraft.api.errors import HTTPError
from rootgraft.api.storage.file_store import FORM_BYTES, MOST_UPLOADS, FileStore, Upload

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
