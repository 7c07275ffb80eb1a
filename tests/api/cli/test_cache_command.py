"""``rootgraft cache`` over folders and servers."""

from __future__ import annotations

import json
import tarfile
from array import array
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.api.api_fakes import FakeClient
from support.api.api_live import Live, make_state, serve

from rootgraft.api.cli.main import main
from rootgraft.api.observe.engine_facts import EngineFacts
from rootgraft.engine.kv_cache.block_codec import BlockCodec
from rootgraft.engine.kv_cache.block_files import BlockFiles
from rootgraft.engine.kv_cache.block_keys import BlockId, BlockScheme
from rootgraft.engine.kv_cache.kv_stores import DiskStore
from rootgraft.radix import namespace
from rootgraft.radix.namespace import Namespace

SCHEME = BlockScheme("fake", 4, 64)
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
TIER = {"bytes": 3e9, "capacity_bytes": 1e10, "pages": 8000, "hits": 120, "misses": 1, "stored": 9000, "evicted": 1000}
TIER |= {"rejected": 2, "errors": 3, "held": 4, "unwritten": 5, "ghost_hits": 6}


def blocks(tenant: str, count: int) -> list[BlockId]:
    tokens, keys = array("i", range(4 * count)).tobytes(), list[bytes]()
    path = namespace.Path(Namespace("b" * 32, "a" * 64 if tenant else None, tenant=tenant))
    SCHEME.extend(keys, path, tokens, count)
    return SCHEME.blocks(keys, path, tokens, 0, count)


def fill(folder: Path, key: bytes = b"") -> None:
    store = DiskStore(BlockFiles(folder), BlockCodec(SCHEME, key), 1 << 20)
    for tenant, count in (("", 2), ("customer", 3)):
        for block in blocks(tenant, count):
            store.put(block, bytes(64))
    store.close()


def say(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["cache", *words]) == 0
    return capsys.readouterr().out


def test_a_folder_is_listed_by_tenant_and_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    rows = [line.split() for line in say(capsys, "ls", str(tmp_path)).splitlines()]
    assert [row[:5] for row in rows[1:]] == [["customer", "a" * 12, "1", "3", "13"], ["-", "-", "1", "2", "8.4"]]
    told = json.loads(say(capsys, "ls", str(tmp_path), "--json"))
    assert [(each["tenant"], each["pages"], each["prompts"]) for each in told] == [("customer", 3, 1), ("", 2, 1)]
    assert say(capsys, "stats", str(tmp_path)) == "5 pages of KV, 21 kB\n"


def test_an_encrypted_folder_tells_only_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, bytes(32))
    told = say(capsys, "ls", str(tmp_path))
    assert told.count("(encrypted)") == 4 and "customer" not in told


def test_a_folder_goes_to_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "one")
    file, other = tmp_path / "kv.tar", tmp_path / "other"
    assert "5 pages" in say(capsys, "export", str(file), "--kv-disk", str(tmp_path / "one"))
    assert "5 pages" in say(capsys, "import", str(file), "--kv-disk", str(other))
    store = DiskStore(BlockFiles(other), BlockCodec(SCHEME), 1 << 20)
    assert [store.get(block) for block in blocks("customer", 3)] == [bytes(64)] * 3
    store.close()
    assert "5 pages" in say(capsys, "clear", str(other))
    assert say(capsys, "ls", str(other)) == "The folder holds no KV.\n"


def test_an_import_keeps_the_bound_and_takes_no_other_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kv.tar"
    with tarfile.open(file, "w") as out:
        names = ["../../evil.kv", "0123456789abcdef/../x.kv", "/etc/x.kv", "0123456789abcdef/" + "0" * 48 + ".kv"]
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 3
            out.addfile(member, BytesIO(b"abc"))
        large = tarfile.TarInfo("0123456789abcdef/" + "1" * 48 + ".kv")
        large.size = 2 << 20
        out.addfile(large, BytesIO(bytes(2 << 20)))
    told = say(capsys, "import", str(file), "--kv-disk", str(tmp_path / "kv"), "--kv-disk-gib", "0.001")
    assert told.startswith("1 pages") and "4 skipped" in told
    assert [path.name for path in tmp_path.rglob("*.kv")] == ["0" * 48 + ".kv"]


ENDLESS = b"\xff" + b"\xff" * 10 + b"\xf0"  # minus some bytes, as a tar file writes numbers of any size


@pytest.mark.parametrize("kind", ["backwards", "beyond", "cut", "huge", "nested", "nothing"])
def test_an_archive_of_another_kind_is_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "one")
    file, other = tmp_path / "kv.tar", str(tmp_path / "other")
    say(capsys, "export", str(file), "--kv-disk", str(tmp_path / "one"))
    content = file.read_bytes()
    first = tarfile.TarInfo.frombuf(content[:512], "utf-8", "strict")
    second = content[512 + -(-first.size // 512) * 512 :]

    def says(size: bytes, type_flag: bytes = b"0") -> bytes:
        """The first header with another size, and its right checksum."""
        header = content[:124] + size + content[136:148] + b" " * 8 + type_flag + content[157:512]
        return header[:148] + b"%06o\0 " % sum(header) + header[156:]

    remark = says(b"00000000000\0", b"x")
    file.write_bytes(
        {
            "backwards": says(ENDLESS) + second,
            "beyond": says(b"77777777777\0") + second,
            "cut": content[: 512 + first.size // 2],
            "huge": says(b"\x80" + b"\xff" * 11) + second,
            "nested": remark * 5000 + content,
            "nothing": b"",
        }[kind]
    )
    code = main(["cache", "import", str(file), "--kv-disk", other])
    out, err = capsys.readouterr()
    if kind == "nested":
        assert code == 0 and out.startswith("5 pages")
        return
    assert code == 1 and "is not a complete file of `rootgraft cache export`" in err and len(err.splitlines()) == 1
    assert not list((tmp_path / "other").rglob("*.kv")) and not out


def test_a_folder_in_use_and_what_is_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    files = BlockFiles(tmp_path)
    for words in (["ls", str(tmp_path)], ["clear", str(tmp_path)]):
        assert main(["cache", *words]) == 1
        assert "A server is using" in capsys.readouterr().err
    files.close()
    assert main(["cache", "ls", str(tmp_path / "none")]) == 1
    (tmp_path / "text").write_text("no archive")
    assert main(["cache", "import", str(tmp_path / "text"), "--kv-disk", str(tmp_path)]) == 1
    assert "not a complete file of `rootgraft cache export`" in capsys.readouterr().err
    assert main(["cache", "export", "file"]) == 2
    assert "Give --kv-disk FOLDER" in capsys.readouterr().err
    assert main(["cache", "export", "file", "--kv-disk", str(tmp_path), "--session", "chat"]) == 2
    assert "give only one of them" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiered() -> Iterator[Live]:
    client = FakeClient()
    client.stats = {"pages": 100.0, "pages_cached": 60.0, "pages_free": 10.0, "pages_available": 90.0}
    client.stats |= {f"kv_{name}_disk": float(count) for name, count in TIER.items()}
    state = make_state()
    state.engine.client = client  # type: ignore[assignment]
    assert state.engine.async_engine is not None
    state.begin_serving(state.engine.async_engine, client, EngineFacts())  # type: ignore[arg-type]
    yield from serve(state)


def test_a_server_tells_its_tiers_and_resets_them(tiered: Live, capsys: pytest.CaptureFixture[str]) -> None:
    with tiered.http() as http:
        url = str(http.base_url).rstrip("/") + "/v1"
        told = http.get("/v1/cache").json()
        assert told["tiers"]["device"] == {"pages": 100, "pages_cached": 60, "pages_free": 10}
        assert told["tiers"]["disk"] == TIER and "host" not in told["tiers"]
        assert http.post("/v1/cache/reset").json()["object"] == "cache.reset"
    text = say(capsys, "stats", "--url", url)
    assert "60 of 100 pages" in text and "3.0 GB of 10 GB" in text
    assert json.loads(say(capsys, "stats", "--url", url, "--json")) == told
    assert "removed" in say(capsys, "clear", "--url", url)
    assert tiered.state.engine.client.num_resets == 2  # type: ignore[union-attr]


def test_metrics_of_tiers_are_those_of_the_page(tiered: Live) -> None:
    with tiered.http() as http:
        families = [*text_string_to_metric_families(http.get("/metrics").text)]
    served = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in families
        if family.name.startswith("rootgraft:kv_tier_")
    }
    section = PAGE.read_text().partition("## Of KV beside the pool")[2].partition("\n## ")[0]
    assert served.keys() == {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")}
    for name, family in served.items():
        [sample] = [each for each in family.samples if not each.name.endswith("_created")]
        assert sample.labels["tier"] == "disk"
        assert sample.value == TIER[name.removeprefix("rootgraft:kv_tier_").removesuffix("_total")]


def test_a_session_goes_from_server_to_server(tiered: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiered.state.engine.client.sessions["team", "chat"] = b"known"  # type: ignore[union-attr]
    file = tmp_path / "chat.kv"
    with tiered.http() as http:
        url = ["--url", str(http.base_url).rstrip("/") + "/v1"]
    assert "5 B of KV" in say(capsys, "export", str(file), "--session", "chat", "--tenant", "team", *url)
    assert file.read_bytes() == b"known"
    assert "16 tokens" in say(capsys, "import", str(file), *url)
    for session in ("none", "chat"):
        assert main(["cache", "export", str(tmp_path / "other.kv"), "--session", session, *url]) == 1
        assert "No KV of this session is cached" in capsys.readouterr().err
    assert not (tmp_path / "other.kv").exists()
    file.write_bytes(b"another model's")
    assert main(["cache", "import", str(file), *url]) == 1
    assert "belongs to another model" in capsys.readouterr().out
    file.write_bytes(b"")
    assert main(["cache", "import", str(file), *url]) == 1
    assert main(["cache", "import", str(tmp_path / "none"), *url]) == 1
