"""Sources and their allow-list: spellings, prefixes, addresses."""

from __future__ import annotations

import pytest

from rootgraft.engine.adapter_sources.source_policy import SourcePolicy, is_public
from rootgraft.engine.adapter_sources.source_uri import has_scheme, is_hub_name, parse_source
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, RequestError

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "text, shown",
    [
        ("org/name", "hf://org/name"),
        ("hf://org/name@v1.0", "hf://org/name@v1.0"),
        ("org/name@feature/x", "hf://org/name@feature/x"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        (f"s3://bucket/a@sha256:{DIGEST.upper()}", f"s3://bucket/a@sha256:{DIGEST}"),
        ("https://Host.Example:443/a%20b/c", "https://host.example/a%20b/c"),
        ("https://host.example:8443/a", "https://host.example:8443/a"),
        ("https://[2606:4700::1]:8443/a", "https://[2606:4700::1]:8443/a"),
        ("file://localhost/srv/a", "file:///srv/a"),
    ],
)
def test_one_spelling_for_each_source(text: str, shown: str) -> None:
    source = parse_source(text)
    assert str(source) == shown and parse_source(shown) == source


@pytest.mark.parametrize(
    "text",
    [
        *(
            "org",
            "org/name/more",
            "/org/name",
            "../name",
            "org/..",
            "org/name@",
            "org/name@a..b",
            "org/name@/a",
            "a b/c",
        ),
        *("http://host/a", "ftp://host/a", "gs://bucket/a", "javascript://host/a", "://a/b", "https:/host/a"),
        *("s3://bucket", "s3://b/a", "s3://Bucket/a", "s3://arn:aws:s3/a", "s3://bucket/a/../b", "s3://bucket//a"),
        *("s3://bucket/a@sha256:12", f"s3://bucket/a@sha256:{DIGEST}0", "s3://bucket/a?versionId=1"),
        *("https://host", "https://user@host/a", "https://user:word@host/a", "https://host/a?b", "https://host/a#b"),
        *("https://host/../a", "https://host/./a", "https://host/%2e%2e/a", "https://host/a%2Fb", "https://host/a\\b"),
        *("https://host\\@other/a", "https://host:0/a", "https://host:99999/a", "https://host:x/a", "https://ho st/a"),
        *("https://h\u00f6st/a", "https://host\u2044x/a", "https://host/a\n", "https://[::1/a", "https://.host/a"),
        *("file://host/a", "file://a", "file:///a/../b", "file:///a//b", "file:///a\0b", "org/name\n", "x" * 3000),
    ],
)
def test_what_is_no_source_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_source(text, "lora_path")
    assert error.value.param == "lora_path" and len(str(error.value)) < 500


def test_names_of_the_hub_are_told_from_paths() -> None:
    assert is_hub_name("org/name") and is_hub_name("org/name@refs/pr/1")
    assert not any(map(is_hub_name, ("name", "./name", "org/name/x", "org/name@", "hf://org/name")))
    assert has_scheme("s3://a") and not has_scheme("org/name") and not has_scheme("a/b://c")


@pytest.mark.parametrize(
    "entries, allowed, refused",
    [
        ((), (), ("org/name", "s3://bucket/a", "https://host/a", "file:///a")),
        (("hf",), ("org/name", "org/name@v1"), ("org/name@refs/pr/1", "s3://bucket/a", "https://huggingface.co/org/a")),
        (("hf://org",), ("org/name",), ("organ/name", "other/org")),
        (("hf://org/name",), ("org/name", "org/name@v1"), ("org/name2", "org/nam")),
        (
            ("s3://bucket/a/",),
            ("s3://bucket/a", "s3://bucket/a/b"),
            ("s3://bucket/ab", "s3://bucket/b", "s3://bucket2/a"),
        ),
        (
            ("https://Host/a",),
            ("https://host/a/b", "https://host:443/a"),
            ("https://host:8443/a/b", "https://x.host/a"),
        ),
        (("file:///srv/a",), ("file:///srv/a/b",), ("file:///srv/ab", "file:///srv")),
        (("file:///",), ("file:///srv/a/b",), ("org/name",)),
        (("10.0.0.0/8",), (), ("org/name", "https://10.0.0.1/a")),
    ],
)
def test_entries_allow_what_lies_below_them(
    entries: tuple[str, ...], allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    policy = SourcePolicy(entries)
    for text in allowed:
        policy.check(parse_source(text), "lora_path")
    for text in refused:
        with pytest.raises(RequestError, match="--adapter-sources does not list it"):
            policy.check(parse_source(text), "lora_path")


@pytest.mark.parametrize(
    "entry",
    [
        *(
            "",
            "all",
            "http://host",
            "https://",
            "https://*.host",
            "https://user@host",
            "s3://",
            "s3",
            "file://",
            "gs://a",
        ),
        *("hf://org/name/x", "hf://org/name@main", "10.0.0.1/8", "10.0.0.0/33", "file:///a/../b", "https://host/a?b"),
        *("hf://../x", "hf:// /x"),
    ],
)
def test_wrong_entries_are_refused_at_the_start(entry: str) -> None:
    with pytest.raises(ConfigError, match="--adapter-sources must be hf, "):
        SourcePolicy([entry])


PRIVATE = [
    *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("192.0.0.8", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "ff0e::1", "2001:db8::1", "::7f00:1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::"),
    *("2002:a00:1::1", "2001:0:4136:e378:8000:63bf:f5ff:fffe", "localhost", ""),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_no_public_ones(address: str) -> None:
    assert not is_public(address) and not SourcePolicy(["hf"]).allows_address(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_public(address) and SourcePolicy(["10.0.0.0/8"]).allows_address(address)


def test_listed_networks_are_allowed_in_whatever_form_their_addresses_come() -> None:
    policy = SourcePolicy(["10.1.0.0/16", "fd00::/8"])
    assert all(map(policy.allows_address, ("10.1.2.3", "::ffff:10.1.2.3", "fd12::1")))
    assert not any(map(policy.allows_address, ("10.2.0.1", "::ffff:10.2.0.1", "fc00::1", "127.0.0.1")))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"max_adapter_bytes": 1023}, "--max-adapter-bytes must be at least 1024"),
        ({"max_adapter_bytes": (4 << 30) + 1}, "--max-adapter-bytes must be at most"),
        ({"max_adapter_cache_bytes": 1 << 20}, "must be at least --max-adapter-bytes"),
        ({"adapter_download_timeout": 0.5}, "--adapter-download-timeout must be at least 1"),
        ({"adapter_download_timeout": 86401.0}, "--adapter-download-timeout must be at most 86400"),
    ],
)
def test_limits_have_bounds(options: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig(enable_lora=True, **options)
    EngineConfig(enable_lora=True, max_adapter_bytes=1024, max_adapter_cache_bytes=1024, adapter_download_timeout=1.0)
    with pytest.raises(ConfigError, match="--adapter-sources needs --enable-lora"):
        EngineConfig(adapter_sources=("hf",))
