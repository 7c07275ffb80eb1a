"""Pin the Dockerfile's base image to the digest that its registry returns now over HTTP.

python deploy/pin_base.py [IMAGE:TAG]    python:3.12-slim-bookworm by default, for all of its platforms
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

import httpx

DOCKERFILE = Path(__file__).with_name("Dockerfile")
IMAGE = "python:3.12-slim-bookworm"
_DOCKER_HUB = "registry-1.docker.io"
# The list of an image's platforms comes before an image of one platform, which a registry answers with otherwise.
_MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json;q=0.5",
        "application/vnd.docker.distribution.manifest.v2+json;q=0.5",
    )
)


class ImageName(NamedTuple):
    """Name of an image: the host of its registry, its repository there, and its tag."""

    registry: str
    repository: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> ImageName:
        """Read ``[HOST[:PORT]/]NAME[:TAG]`` as Docker does. Raises SystemExit for anything else."""
        host, slash, rest = text.partition("/")
        has_host = bool(slash) and (host == "localhost" or "." in host or ":" in host)
        found = re.fullmatch(r"([a-z0-9][a-z0-9._/-]*)(?::(\w[\w.-]{0,127}))?", rest if has_host else text)
        if found is None:
            raise SystemExit(f"{text!r} is not an image: it must be [HOST[:PORT]/]NAME[:TAG], without a digest.")
        name, tag = found[1], found[2] or "latest"
        if has_host and host != "docker.io":
            return cls(host, name, tag)
        return cls(_DOCKER_HUB, name if "/" in name else f"library/{name}", tag)

    @property
    def url(self) -> str:
        """Return the address of the tag's manifest; a registry of this machine is asked without TLS, as by Docker."""
        scheme = "http" if self.registry.split(":")[0] in ("localhost", "127.0.0.1") else "https"
        return f"{scheme}://{self.registry}/v2/{self.repository}/manifests/{self.tag}"


def bearer(http: httpx.Client, challenge: str) -> str:
    """Return the token that a registry's ``WWW-Authenticate`` header says where to get, without a name."""
    given = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    if not challenge.lower().startswith("bearer ") or "realm" not in given:
        raise SystemExit(f"The registry asks for credentials: {challenge or 'it does not say which'}.")
    realm = given.pop("realm")
    asked = {name: value for name, value in given.items() if name in ("service", "scope")}
    body = http.get(realm, params=asked).raise_for_status().json()
    return str(body.get("token") or body["access_token"])


def newest_digest(name: ImageName) -> str:
    """Ask a registry which manifest a tag has. Raises SystemExit where it has none, or tells another digest of it."""
    with httpx.Client(timeout=60, follow_redirects=True) as http:
        reply = http.get(name.url, headers={"Accept": _MANIFESTS})
        if reply.status_code == 401:
            token = bearer(http, reply.headers.get("WWW-Authenticate", ""))
            reply = http.get(name.url, headers={"Accept": _MANIFESTS, "Authorization": f"Bearer {token}"})
    if reply.status_code != 200:
        raise SystemExit(f"{name.url} answers {reply.status_code}.")
    digest = f"sha256:{hashlib.sha256(reply.content).hexdigest()}"
    if (told := reply.headers.get("Docker-Content-Digest", digest)) != digest:
        raise SystemExit(f"{name.url} reports {told}, but its manifest has {digest}.")
    return digest


def pin(dockerfile: Path, image: str) -> str:
    """Write an image's newest digest into the ``ARG BASE`` of a Dockerfile. Returns what stands there then."""
    pinned = f"{image}@{newest_digest(ImageName.parse(image))}"
    text, count = re.subn(r"(?m)^ARG BASE=.*$", f"ARG BASE={pinned}", dockerfile.read_text("utf-8"))
    if count != 1:
        raise SystemExit(f"{dockerfile} must have one line ARG BASE=, not {count}.")
    dockerfile.write_text(text, "utf-8")
    return pinned


def main() -> None:
    """Write the digest, and print it."""
    try:
        print(pin(DOCKERFILE, sys.argv[1] if len(sys.argv) > 1 else IMAGE))
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise SystemExit(f"The registry cannot be reached: {type(error).__name__}: {error}") from None


if __name__ == "__main__":
    main()
