"""Adapter sources: names on the Hugging Face Hub, ``s3://``, ``https://`` and ``file://`` URIs, parsed strictly.

    org/name, org/name@revision, hf://org/name@revision
    s3://bucket/folder, https://host:port/folder, file:///folder    each also with @sha256:DIGEST

A source is a folder with ``adapter_config.json`` and ``adapter_model.safetensors``. DIGEST is the SHA-256 of the bytes
of both files, in this order: ``cat adapter_config.json adapter_model.safetensors | sha256sum``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from ..errors import RequestError, quoted

FORMS = "org/name, hf://org/name@revision, s3://bucket/folder, https://host/folder or file:///folder"
SCHEMES = ("hf", "s3", "https", "file")
MOST_CHARACTERS = 2048

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w.+-]*(?:/[A-Za-z0-9][\w.+-]*)*", re.ASCII)
_MOST_REVISION = 128
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"(.*)@sha256:([0-9A-Fa-f]{64})", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?|\[[0-9a-f:.]{2,45}\]")
# A part of a URL or key: unreserved characters, harmless others, and escapes of anything but dots and separators.
_SEGMENT = re.compile(r"(?:[\w.~!$'()*+,;=:@-]|%(?!2[EeFf]|5[Cc]|00)[0-9A-Fa-f]{2})+", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Source of an adapter.

    Attributes:
        scheme: one of ``SCHEMES``.
        location: ``org/name``, ``bucket/folder``, ``host:port/folder`` without the default port, or ``/folder``.
        revision: for the Hub, the branch, tag or commit; empty for the default branch.
        digest: SHA-256 that the content must have, in hexadecimal; empty for any.
    """

    scheme: str
    location: str
    revision: str = ""
    digest: str = ""

    def __str__(self) -> str:
        pin = self.revision or (f"sha256:{self.digest}" if self.digest else "")
        return f"{self.scheme}://{self.location}" + (f"@{pin}" if pin else "")

    @property
    def is_pinned(self) -> bool:
        """Whether the content can never be another: pinned by a commit of the Hub or by its digest."""
        return bool(self.digest or _COMMIT.fullmatch(self.revision))

    @property
    def last_part(self) -> str:
        return self.location.rpartition("/")[2]

    def pinned(self, revision: str, digest: str) -> AdapterSource:
        """Return the source with its exact version: a commit on the Hub, a digest elsewhere."""
        return replace(self, revision=revision) if revision else replace(self, digest=digest)


def is_hub_name(text: str) -> bool:
    """Return whether a text is ``org/name`` or ``org/name@revision``."""
    name, at, revision = text.partition("@")
    return bool(_HUB_NAME.fullmatch(name)) and (not at or _is_revision(revision))


def has_scheme(text: str) -> bool:
    """Return whether a text is a URI, of whatever scheme."""
    return _SCHEME.match(text) is not None


def parse_source(text: str, param: str | None = None) -> AdapterSource:
    """Parse the name or URI of an adapter.

    Args:
        param: the request's field, for errors.

    Raises:
        RequestError: the text has none of the forms that are listed above, or has parts that are not allowed.
    """
    if len(text) > MOST_CHARACTERS:
        raise RequestError(f"An adapter's source may have at most {MOST_CHARACTERS} characters.", param=param)
    found = _SCHEME.match(text)
    scheme = found[1].lower() if found else "hf"
    rest = text[found.end() :] if found else text
    if scheme not in SCHEMES:
        raise RequestError(f"An adapter's source must be {FORMS}, not {quoted(text)}.", param=param)
    if scheme == "hf":
        return _hub_source(rest, text, param)
    pinned = _DIGEST.fullmatch(rest)
    place, digest = (pinned[1], pinned[2].lower()) if pinned else (rest, "")
    location = None if "@sha256:" in place else location_of(scheme, place)
    if location is None or not location.partition("/")[2]:
        raise RequestError(f"{quoted(text)} is not an adapter's source: {_PARTS[scheme]}", param=param)
    return AdapterSource(scheme, location, digest=digest)


_PIN = "optionally followed by @sha256: and 64 hexadecimal digits."
_PARTS = {
    "s3": f"it must be s3://BUCKET/FOLDER, {_PIN}",
    "https": f"it must be https://HOST/FOLDER without user, query, fragment, '.' or '..', {_PIN}",
    "file": f"it must be file:///FOLDER without '.' or '..', {_PIN}",
}


def location_of(scheme: str, place: str) -> str | None:
    """Return what follows ``scheme://`` in its one spelling, without a slash at its end; None if it is malformed."""
    if scheme == "file":
        return _file_location(place)
    head, _, path = place.partition("/")
    head = head.lower() if scheme == "https" else head
    if not (_is_authority(head) if scheme == "https" else _BUCKET.fullmatch(head)):
        return None
    path = path.removesuffix("/")
    if path and not all(_is_segment(part) for part in path.split("/")):
        return None
    return "/".join(filter(None, (head.removesuffix(":443") if scheme == "https" else head, path)))


def _hub_source(rest: str, text: str, param: str | None) -> AdapterSource:
    name, _, revision = rest.removesuffix("/").partition("@")
    if not is_hub_name(rest.removesuffix("/")):
        raise RequestError(
            f"{quoted(text)} is not a name on the Hub: it must be org/name or org/name@revision.", param=param
        )
    return AdapterSource("hf", name, revision)


def _is_revision(text: str) -> bool:
    return len(text) <= _MOST_REVISION and ".." not in text and bool(_REVISION.fullmatch(text))


def _is_authority(text: str) -> bool:
    """Return whether a text is host or host:port, spelt so that no two parsers read different hosts in it."""
    try:
        parts = urlsplit(f"https://{text}")
        port = parts.port
    except ValueError:
        return False
    host = text if port is None else text[: -len(f":{port}")]
    return bool(_HOST.fullmatch(host)) and (port is None or 0 < port < 65536) and ".." not in host


def _is_segment(text: str) -> bool:
    return text.partition(";")[0] not in (".", "..") and bool(_SEGMENT.fullmatch(text))


def _file_location(place: str) -> str | None:
    place = place.removeprefix("localhost")
    path = place.rstrip("/")
    parts = path.split("/")[1:]
    if not place.startswith("/") or "\0" in place or any(part in ("", ".", "..") for part in parts):
        return None
    return path or "/"
