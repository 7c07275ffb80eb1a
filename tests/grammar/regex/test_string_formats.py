"""The formats that are asserted: never wider than python-jsonschema's checkers, and not much narrower."""

from __future__ import annotations

import ipaddress
import json
import random

import jsonschema
import pydantic
import pytest

from rootgraft.grammar.regex import string_formats
from rootgraft.grammar.regex.string_formats import FORMATS, NARROWER

VERSIONS = (1, 3, 4, 5, 6, 7, 8)
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
PYDANTIC = {
    **{f"uuid{version}": getattr(pydantic, f"UUID{version}") for version in VERSIONS},
    "ipv4interface": ipaddress.IPv4Interface,
    "ipv6interface": ipaddress.IPv6Interface,
    "ipv4network": ipaddress.IPv4Network,
    "ipv6network": ipaddress.IPv6Network,
    "ipvanyaddress": pydantic.IPvAnyAddress,
    "ipvanyinterface": pydantic.IPvAnyInterface,
}


def check(text: str, name: str) -> None:
    """Raise ValueError unless a text has a format, by who writes the format in schemas."""
    if name in PYDANTIC:
        pydantic.TypeAdapter(PYDANTIC[name]).validate_json(json.dumps(text))
    else:
        CHECKER.check(text, name)


GOOD = {
    "date": ["2024-02-29", "1999-12-31", "0001-01-01"],
    "time": ["23:59:59Z", "00:00:00.25+05:30"],
    "date-time": ["2024-02-29T12:00:00Z", "2023-01-01T00:00:00.123-08:00"],
    "duration": ["P1Y2M3DT4H5M6S", "PT5M", "P3W"],
    "email": ["a.b+c@example.co.uk", "x@[127.0.0.1]"],
    "idn-email": ["a@b.c"],
    "hostname": ["example.com", "a-b.c", "localhost"],
    "idn-hostname": ["example.com", "a-b.c"],
    "ipv4": ["0.0.0.0", "255.249.99.1"],
    "ipv6": ["::", "::1", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8", "::ffff:192.0.2.1"],
    "uri": ["http://u:p@e.com:80/a/b?q=1#f", "mailto:a@b.c", "urn:x:y", "http://[::1]/"],
    "uri-reference": ["../a?b#c", "", "#x", "http://e.com"],
    "iri": ["http://ƒøø.ßår/?∂éœ=πîx#πîüx"],
    "iri-reference": ["//ƒøø.ßår/", "a"],
    "uri-template": ["http://e.com/{a}/{+b,c*}{?q:3}", "plain"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    **{f"uuid{version}": [f"123e4567-E89b-{version}2d3-{'89aB'[version % 4]}456-426614174000"] for version in VERSIONS},
    "ipv4interface": ["10.1.2.3/8", "10.1.2.3", "0.0.0.0/0", "1.2.3.4/32"],
    "ipv6interface": ["2001:db8::1/64", "::1", "::/0", "fe80::1/128"],
    "ipv4network": [
        "10.0.0.0/8",
        "192.168.4.0/22",
        "0.0.0.0/0",
        "1.2.3.4/32",
        "1.2.3.4",
        "10.0.0.254/31",
        "128.0.0.0/1",
    ],
    "ipv6network": ["2001:db8::/32", "2001:db8::/48", "2001:db8:1:ff00::/64", "::/0", "::1", "fe80::1/128", "1::/16"],
    "ipvanyaddress": ["10.1.2.3", "2001:db8::1"],
    "ipvanyinterface": ["10.1.2.3/8", "2001:db8::1/64"],
    "json-pointer": ["", "/a~1b/0", "/~0"],
    "relative-json-pointer": ["0", "1/a", "2#"],
    "regex": ["^[a-z]+(foo|bar)?$", "", r"\d{3}.*"],
}
BAD = {
    "date": ["2023-02-29", "2024-13-01", "0000-01-01", "24-01-01", "2024-1-1"],
    "time": ["24:00:00Z", "12:00:60Z", "12:00:00"],
    "date-time": ["2023-02-29T12:00:00Z", "2023-01-01 00:00:00Z", "2023-01-01T00:00:00"],
    "duration": ["P", "PT", "1Y", "P1D2H"],
    "email": ["a", "a b@c", "@"],
    "hostname": ["-a.com", "a..b", "a" * 64],
    "ipv4": ["256.0.0.1", "1.2.3", "01.2.3.4"],
    "ipv6": [":::", "1:2", "12345::"],
    "uri": ["a b", "/rel", "http://e.com/<x>"],
    "uuid": ["123e4567e89b12d3a456426614174000"],
    **{f"uuid{version}": [f"123e4567-e89b-{version % 8 + 1}2d3-a456-426614174000"] for version in VERSIONS},
    "uuid4": ["123e4567-e89b-42d3-c456-426614174000", "123e4567e89b42d3a456426614174000"],
    "ipv4interface": ["10.1.2.3/33", "10.1.2/8", "10.1.2.3/", "10.1.2.256/8"],
    "ipv6interface": ["::/129", "::1/", "12345::/8"],
    "ipv4network": ["10.0.0.1/8", "192.168.5.0/22", "1.2.3.4/31.", "1.2.3.5/31", "0.0.0.0/33", "1.0.0.0/0"],
    "ipv6network": ["2001:db8::1/64", "2001:db8::/31", "::/129", "1:2:3:4:5:6:7::/111"],
    "ipvanyaddress": ["10.1.2.3/8", "::/0"],
    "ipvanyinterface": ["10.1.2.3/33", "::/129"],
    "json-pointer": ["a", "/~2"],
    "regex": ["(", "["],
}


@pytest.mark.parametrize("name", sorted(PYDANTIC))
def test_these_are_the_formats_that_pydantic_writes(name):
    assert pydantic.TypeAdapter(PYDANTIC[name]).json_schema() == {"type": "string", "format": name}


def test_every_asserted_format_is_tested_and_known_to_the_checker():
    assert set(GOOD) == set(FORMATS)
    assert set(NARROWER) <= set(FORMATS)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_good_and_bad_examples(name):
    for text in GOOD[name]:
        assert FORMATS[name].matches(text), text
        check(text, name)
    for text in BAD.get(name, []):
        assert not FORMATS[name].matches(text), text


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_random_texts_of_a_format_pass_the_checker(grammars, name):
    compiled = grammars.schema({"type": "string", "format": name})
    for seed in range(12):
        text = grammars.draw(compiled.matcher(), random.Random(seed), 60)
        assert text is not None
        check(json.loads(text), name)


def test_an_unknown_format_is_an_annotation(grammars):
    assert grammars.admits(grammars.schema({"format": "no-such-format"}), '"anything"')


def test_a_pattern_is_parsed_when_it_is_first_asked_for_and_kept(monkeypatch):
    parsed = []
    monkeypatch.setattr(string_formats, "parse", lambda source, whole: parsed.append(source) or len(parsed))
    patterns = string_formats.FormatPatterns()
    assert "date" in patterns and "nothing" not in patterns and 7 not in patterns and len(patterns) == len([*patterns])
    assert not parsed
    assert patterns["date"] == patterns["date"] == patterns.get("date") == 1 and patterns.get("nothing") is None
    assert parsed == [string_formats.SOURCES["date"]]
    with pytest.raises(KeyError):
        patterns["nothing"]
