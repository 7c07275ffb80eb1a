"""JSON Schema validators: the parts of ``jsonschema`` that are used, with a check of IRIs (RFC 3987) of its own.

The package that ``jsonschema`` would use for IRIs builds a grammar when it is imported, which takes seconds at each
start. A text is an IRI if its mapping to a URI (RFC 3987, 3.1) is a URI, so the check of URIs is used for both.
"""

from __future__ import annotations

import ipaddress
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rfc3986_validator import validate_rfc3986

from ...grammar.regex.string_formats import FORMATS, UUID_VERSIONS


@contextmanager
def _not_importable(package: str) -> Iterator[None]:
    """Context manager: imports of a package fail within the block, unless it has been imported before."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


with _not_importable("rfc3987_syntax"):
    from jsonschema import Draft202012Validator, FormatChecker, ValidationError
    from jsonschema.protocols import Validator
    from jsonschema.validators import extend, validator_for

__all__ = [
    "FORMAT_CHECKER",
    "Draft202012Validator",
    "ValidationError",
    "Validator",
    "extend",
    "is_iri",
    "validator_for",
]

_PLANES = "".join(f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14))
_LAST_PLANE = "\U000e1000-\U000efffd"
_UCSCHAR = re.compile(f"[\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef{_PLANES}{_LAST_PLANE}]")
_IPRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_QUERY = re.compile(r"[^?#]*\?([^#]*)")


def is_iri(text: object, rule: str = "URI") -> bool:
    """Return whether a string is an IRI; True for values of other types.

    Args:
        rule: ``URI``, or ``URI_reference`` to accept relative references too.
    """
    if not isinstance(text, str):
        return True
    mapped = _UCSCHAR.sub("%C3", text)
    if query := _QUERY.match(mapped):
        mapped = mapped[: query.start(1)] + _IPRIVATE.sub("%EE", query[1]) + mapped[query.end() :]
    return mapped.isascii() and validate_rfc3986(mapped, rule=rule) is not None


_ADDRESSES: dict[str, Callable[[str], object]] = {
    "ipv4interface": ipaddress.IPv4Interface,
    "ipv6interface": ipaddress.IPv6Interface,
    "ipv4network": ipaddress.IPv4Network,
    "ipv6network": ipaddress.IPv6Network,
    "ipvanyaddress": ipaddress.ip_address,
    "ipvanyinterface": ipaddress.ip_interface,
}


def _is_uuid(value: object, version: int) -> bool:
    return not isinstance(value, str) or uuid.UUID(value).version == version


def _is_made(value: object, make: Callable[[str], object]) -> bool:
    return not isinstance(value, str) or make(value) is not None


def _format_checker() -> FormatChecker:
    """Return a format checker for the formats that grammars enforce, in every draft. Other formats are annotations."""
    checker = FormatChecker(())
    own: dict[str, tuple[Callable[[object], bool], tuple[type[Exception], ...]]] = {
        "iri": (is_iri, ()),
        "iri-reference": (partial(is_iri, rule="URI_reference"), ()),
        **{f"uuid{version}": (partial(_is_uuid, version=version), (ValueError,)) for version in UUID_VERSIONS},
        **{name: (partial(_is_made, make=make), (ValueError,)) for name, make in _ADDRESSES.items()},
    }
    checkers = {**Draft202012Validator.FORMAT_CHECKER.checkers, **own}
    checker.checkers = {name: checkers[name] for name in FORMATS}
    return checker


FORMAT_CHECKER = _format_checker()
"""Checks each format in ``FORMATS``. Other formats are annotations and are not checked."""
