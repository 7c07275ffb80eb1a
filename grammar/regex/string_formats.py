r"""JSON Schema's ``format``: a pattern over the whole string for each asserted format; others are annotations.

A pattern matches only strings that both the standard and python-jsonschema's checkers admit, so a finished answer is
valid for both. `NARROWER` lists the patterns that match fewer strings than that. In addition to the formats of the
standard there are those that pydantic writes for UUIDs of one version and for networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .ecma_regex import Pattern, parse

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_DURATION_TIME = r"T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_DURATION_DATE = r"(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
# "--" as third and fourth character would mark an internationalised label, which must decode.
_PLAIN_LABEL = "[a-z0-9](?:[a-z0-9]|-[a-z0-9]){0,30}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = "[0-9a-fA-F]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "(?:" + "|".join(
    (
        f"(?:{_H16}:){{6}}{_LS32}",
        f"::(?:{_H16}:){{5}}{_LS32}",
        f"(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}",
        f"(?:(?:{_H16}:){{0,1}}{_H16})?::(?:{_H16}:){{3}}{_LS32}",
        f"(?:(?:{_H16}:){{0,2}}{_H16})?::(?:{_H16}:){{2}}{_LS32}",
        f"(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}",
        f"(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}",
        f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
        f"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    )
) + ")"  # fmt: skip
_HEX2 = "%[0-9A-Fa-f]{2}"
UUID_VERSIONS = (1, 3, 4, 5, 6, 7, 8)
"""Of UUIDs whose version a format may name."""


def _one_of(numbers: Iterable[int]) -> str:
    return f"(?:{'|'.join(map(str, numbers))})"


def _ipv4_networks() -> str:
    """Return the pattern of addresses whose bits after the given number are zero."""
    found = [rf"{_IPV4}(?:/32)?"]
    for bits in range(32):
        octets, rest = divmod(bits, 8)
        parts = [_OCTET] * octets + [_one_of(range(0, 256, 1 << (8 - rest)))] + ["0"] * (3 - octets)
        found.append(rf"{r'[.]'.join(parts)}/{bits}")
    return f"(?:{'|'.join(found)})"


def _ipv6_networks() -> str:
    """Return the pattern of networks ``ADDRESS/BITS`` whose address has no more leading groups than those bits fill."""
    found = [f"{_IPV6}(?:/128)?", f"::/{_one_of(range(129))}"]
    found += [f"{_H16}(?::{_H16}){{{groups - 1}}}::/{_one_of(range(16 * groups, 129))}" for groups in range(1, 8)]
    return f"(?:{'|'.join(found)})"


def _uri(letters: str, ipv6: str) -> tuple[str, str]:
    """Return the patterns of an absolute reference and of any reference, over given unreserved characters."""
    plain = rf"{letters}0-9_.~!$&'()*+,;=\-"
    pchar = f"(?:[{plain}:@]|{_HEX2})"
    authority = (
        rf"(?:(?:[{plain}:]|{_HEX2})*@)?(?:\[(?:{ipv6}|v[0-9A-Fa-f]+\.[a-zA-Z0-9_.~!$&'()*+,;=:\-]+)\]"
        rf"|(?:[{plain}]|{_HEX2})*)(?::[0-9]*)?"
    )
    query = f"(?:[{plain}:@/?]|{_HEX2})*"
    tail = rf"(?:\?{query})?(?:#{query})?"
    rooted = f"//{authority}(?:/{pchar}*)*|/(?:{pchar}+(?:/{pchar}*)*)?"
    absolute = rf"[a-zA-Z][a-zA-Z0-9+.\-]*:(?:{rooted}|{pchar}+(?:/{pchar}*)*|){tail}"
    relative = rf"(?:{rooted}|(?:[{plain}@]|{_HEX2})+(?:/{pchar}*)*|){tail}"
    return absolute, f"(?:{absolute}|{relative})"


def _name(label: str, short: str) -> str:
    """Return the pattern of a host name of at most 253 characters: few labels, or more short ones."""
    return rf"{short}(?:\.{short}){{0,9}}|{label}(?:\.{label}){{0,2}}"


_INTERFACE4 = f"{_IPV4}(?:/{_one_of(range(33))})?"
_INTERFACE6 = f"{_IPV6}(?:/{_one_of(range(129))})?"
_URI, _URI_REFERENCE = _uri("a-zA-Z", _IPV6)
# The ucschar ranges of the basic plane.
_IRI, _IRI_REFERENCE = _uri(r"a-zA-Z\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef", f"(?:{_H16}:){{6}}{_LS32}")
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_REGEX_ATOM = (
    r"(?:[A-Za-z0-9 _,:;@#%&=!<>'/\-]|\\[dwsDWS.*+?()\[\]{}|\^$/\-]|\.|\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_ .,])+\])"
)
_REGEX_UNIT = rf"{_REGEX_ATOM}(?:[*+?]|\{{[0-9]\}})?"
_REGEX_FLAT = rf"(?:{_REGEX_UNIT})+(?:\|(?:{_REGEX_UNIT})+)*"
_REGEX_GROUP = rf"(?:{_REGEX_UNIT}|\((?:\?:)?{_REGEX_FLAT}\)[*+?]?)"
_TEMPLATE_NAME = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*(?:\*|:[1-9][0-9]{0,2})?"

SOURCES: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]{{1,9}}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_DOMAIN}|\[{_IPV4}\])",
    "idn-email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_DOMAIN}|\[{_IPV4}\])",
    "hostname": _name(_LABEL, _LABEL.replace("61", "22")),
    "idn-hostname": _name(_PLAIN_LABEL, _PLAIN_LABEL.replace("30", "11")),
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "uri-template": rf"(?:[A-Za-z0-9_.~!$&()*+,;=:@/?#\[\]\-]|{_HEX2}|\{{[+#./;?&]?{_TEMPLATE_NAME}"
    rf"(?:,{_TEMPLATE_NAME})*\}})*",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    **{
        f"uuid{version}": f"[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}"
        "-[0-9a-fA-F]{12}"
        for version in UUID_VERSIONS
    },
    "ipv4interface": _INTERFACE4,
    "ipv6interface": _INTERFACE6,
    "ipv4network": _ipv4_networks(),
    "ipv6network": _ipv6_networks(),
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    "ipvanyinterface": f"(?:{_INTERFACE4}|{_INTERFACE6})",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9]{{1,9}}0?)(?:#|{_POINTER})",
    "regex": rf"\^?(?:{_REGEX_GROUP}(?:\|{_REGEX_GROUP})?)*\$?",
}


class FormatPatterns(Mapping[str, Pattern]):
    """Patterns by format, each parsed when it is first asked for: parsing all takes 150 ms, and most are never used."""

    def __init__(self) -> None:
        self._parsed: dict[str, Pattern] = {}

    def __getitem__(self, name: str) -> Pattern:
        if name not in self._parsed:
            self._parsed[name] = parse(SOURCES[name], whole=True)
        return self._parsed[name]

    def __contains__(self, name: object) -> bool:
        return name in SOURCES

    def __iter__(self) -> Iterator[str]:
        return iter(SOURCES)

    def __len__(self) -> int:
        return len(SOURCES)


FORMATS = FormatPatterns()

# What the standard permits and the patterns do not.
NARROWER: dict[str, str] = {
    "time": "no leap second, upper-case Z, at most nine digits of a second",
    "date-time": "like date and time, with an upper-case T",
    "duration": "at most nine digits per number",
    "email": "no quoted local part, and only IPv4 as address literal",
    "idn-email": "ASCII only, like email",
    "hostname": "at most ten labels of 24 characters, or three longer ones",
    "idn-hostname": "ASCII only, lower case, no two hyphens in a row, labels like hostname",
    "iri": "characters of the basic plane except private ones; IPv6 addresses in full",
    "iri-reference": "like iri",
    "uri-template": "ASCII literals, prefixes of at most 999 characters",
    "ipv4interface": "no network mask; the prefix in plain digits",
    "ipv4network": "like ipv4interface; no bits after the prefix",
    "ipv6network": "an address, or at most seven groups and `::`, with a prefix of at least these groups",
    "ipvanyinterface": "like ipv4interface",
    "relative-json-pointer": "no digit after a zero",
    "regex": "groups one level deep, no lookaround, no back-reference",
}


# Patterns that match all strings that any validator accepts for a format, and some similar strings. So a string that
# does not match is certainly not valid. Formats that have too many interpretations are not listed.
LOOKALIKES = {
    "date": "^[0-9W-]{8,10}$",
    "time": r"^[0-9]{2}:[0-9]{2}:[0-9]{2}[\s\S]*$",
    "date-time": r"^[0-9]{4}-?[0-9]{2}-?[0-9]{2}[Tt\s_][\s\S]*$",
    "duration": r"^[+-]?[Pp][\s\S]*$",
    "email": "@",
    "idn-email": "@",
    "hostname": "^[A-Za-z0-9._-]*$",
    "ipv4": "^[0-9.]*$",
    "ipv6": "^[0-9A-Fa-f:.]*:",
    "uri": "^[A-Za-z][A-Za-z0-9+.-]*:",
    "json-pointer": r"^(?:/[\s\S]*)?$",
    "relative-json-pointer": "^[0-9]",
    **dict.fromkeys(("uuid", *(f"uuid{version}" for version in (1, 3, 4, 5, 6, 7, 8))), r"^[0-9A-Za-z{}:-]{32,50}$"),
}
