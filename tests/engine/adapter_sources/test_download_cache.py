"""The cache on disk: bounds, what is in use, processes that share it or were killed, damage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.adapter_sources.source_files import CONFIG, WEIGHTS, adapter_files, digest_of

from rootgraft.engine.adapter_sources.download_cache import CacheFull, DownloadCache
from rootgraft.engine.errors import AdapterUnavailable

SIZE = sum(map(len, adapter_files().values()))


def put(cache: DownloadCache, seed: int) -> tuple[str, Path]:
    """Publish an adapter as a download does; returns digest and folder."""
    files = adapter_files(seed)
    with cache.partial(f"key{seed}") as partial:
        assert partial is not None
        cache.reserve(partial, sum(map(len, files.values())))
        for name, content in files.items():
            (partial / name).write_bytes(content)
        return digest_of(files), cache.publish(partial, digest_of(files))


def test_what_was_used_longest_ago_and_nobody_uses_is_evicted(tmp_path: Path) -> None:
    cache = DownloadCache(tmp_path, 3 * SIZE + 100)
    (first, in_use), (second, folder), (third, other) = (put(cache, seed) for seed in range(3))
    cache.release(folder)
    cache.release(other)
    again = cache.use(second)  # now the third was used longest ago
    assert again is not None
    cache.release(again)
    put(cache, 3)
    assert cache.holds(first) and cache.holds(second) and not cache.holds(third)
    assert (in_use / WEIGHTS).read_bytes() == adapter_files(0)[WEIGHTS]
    put(cache, 4)
    assert cache.holds(first) and not cache.holds(second)
    with pytest.raises(CacheFull, match=f"the limit is {3 * SIZE + 100:,} \\(--max-adapter-cache-bytes\\)"):
        put(cache, 5)
    cache.release(in_use)
    put(cache, 5)
    assert not cache.holds(first)
    assert sum(path.stat().st_size for path in (tmp_path / "content").rglob("*") if path.is_file()) <= 3 * SIZE + 100
    cache.close()


def test_downloads_in_progress_count_with_all_their_bytes(tmp_path: Path) -> None:
    cache, other = DownloadCache(tmp_path, 2 * SIZE), DownloadCache(tmp_path, 2 * SIZE)
    with cache.partial("a") as one, other.partial("b") as two, other.partial("c") as three:
        assert one is not None and two is not None and three is not None
        cache.reserve(one, SIZE)
        other.reserve(two, SIZE)
        with pytest.raises(CacheFull):
            other.reserve(three, 1)
        with other.partial("a") as locked:
            assert locked is None
    with other.partial("c") as three:  # the others are broken off: their room is free
        assert three is not None
        other.reserve(three, 1)
    for each in (cache, other):
        each.close()


def test_what_another_process_uses_stays_until_it_ends_however_it_ends(tmp_path: Path) -> None:
    cache = DownloadCache(tmp_path, SIZE + 100)
    digest, folder = put(cache, 0)
    code = (
        "import sys, pathlib; from rootgraft.engine.adapter_sources.download_cache import DownloadCache\n"
        f"cache = DownloadCache(pathlib.Path({str(tmp_path)!r}), {SIZE}); print(cache.use({digest!r}), flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdin=-1, stdout=-1, text=True) as process:
        try:
            assert process.stdout is not None
            theirs = Path(process.stdout.readline().strip())
            assert (theirs / WEIGHTS).read_bytes() == adapter_files(0)[WEIGHTS]
            cache.release(folder)
            with pytest.raises(CacheFull):
                put(cache, 1)
        finally:
            process.kill()
    put(cache, 1)
    assert not cache.holds(digest) and not theirs.exists()
    cache.close()
    assert not list((tmp_path / "users").iterdir())


def test_damaged_content_is_found_once_in_each_process(tmp_path: Path) -> None:
    before = DownloadCache(tmp_path, 1 << 24)
    digest, _ = put(before, 0)
    before.note("hf://a/b", "commit", digest)
    before.close()
    (tmp_path / "content" / digest / CONFIG).write_bytes(b"{}")
    after = DownloadCache(tmp_path, 1 << 24)
    assert after.find("hf://a/b", "commit") == (digest, "commit") and after.find("hf://a/b", "other") is None
    assert after.use(digest) is None and not after.holds(digest)
    assert after.find("hf://a/b", None) is None and after.find("hf://a/c", None) is None
    after.close()


def test_notes_and_locks_go_with_what_they_are_for(tmp_path: Path) -> None:
    cache = DownloadCache(tmp_path, SIZE + 100)
    first, folder = put(cache, 0)
    cache.note("hf://a/b", "one", first)
    cache.release(folder)
    second, folder = put(cache, 1)
    cache.note("hf://a/c", "two", second)
    assert [path.suffix for path in (tmp_path / "versions").iterdir()] == [".json"]
    assert cache.find("hf://a/c", "two") == (second, "two")
    with pytest.raises(OSError, match="broken"), cache.partial("key") as partial:
        assert partial is not None
        partial.rmdir()
        raise OSError("broken")
    assert not list((tmp_path / "partial").iterdir())
    for name in ("versions/left.new", "partial/left.lock"):
        (tmp_path / name).touch()
    with cache.partial("kept") as partial:
        after = DownloadCache(tmp_path, SIZE + 100)
        assert {path.name for path in (tmp_path / "partial").iterdir()} == {"kept", "kept.lock"}
        after.close()
    assert [path.suffix for path in (tmp_path / "versions").iterdir()] == [".json"]
    cache.close()


def test_a_cache_that_cannot_be_written_is_an_error_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterUnavailable, match=r"--adapter-cache-dir\) cannot be written") as error:
        DownloadCache(tmp_path / "file" / "cache", 1 << 20)
    assert str(tmp_path) not in str(error.value)
