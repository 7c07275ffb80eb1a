"""Source policy: the allow-list of ``--adapter-sources``, and the addresses to which downloads may connect."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from ..errors import ConfigError, RequestError
from .source_uri import AdapterSource, is_hub_name, location_of

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")  # the only part of IPv6 in which addresses of the internet lie
_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")
_ENTRIES = (
    "hf, hf://ORG, hf://ORG/NAME, s3://BUCKET/FOLDER, https://HOST/FOLDER, file:///FOLDER, or a network such as "
    "10.1.0.0/16"
)


class SourcePolicy:
    """Rules for the sources that requests may load, and for the addresses to which downloads may connect.

    Args:
        entries: words of ``--adapter-sources``; see ``docs/guide/adapter-sources.md``.

    Raises:
        ConfigError: an entry is not a source.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._prefixes: list[tuple[str, str]] = []
        self._networks: list[IPv4Network | IPv6Network] = []
        for entry in entries:
            network = _network(entry)
            if network is not None:
                self._networks.append(network)
            else:
                self._prefixes.append(_prefix(entry))

    def allows(self, source: AdapterSource) -> bool:
        """Return whether requests may load from a source."""
        if source.scheme == "hf" and source.revision.startswith("refs/"):
            # Anybody may open a pull request, so that its revision is not trusted.
            return False
        return self.lists(source.scheme, source.location)

    def lists(self, scheme: str, location: str) -> bool:
        """Return whether an entry is this place or a folder above it."""
        return any(
            own == scheme and (not prefix or location == prefix or location.startswith(prefix.rstrip("/") + "/"))
            for own, prefix in self._prefixes
        )

    def check(self, source: AdapterSource, param: str | None) -> None:
        """Raise RequestError unless requests may load from a source."""
        if not self.allows(source):
            raise RequestError(
                f"This server does not load adapters from {source}: --adapter-sources does not list it.",
                param=param,
                code="adapter_source_not_allowed",
            )

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders below which ``file://`` sources lie."""
        return tuple(prefix for scheme, prefix in self._prefixes if scheme == "file")

    @property
    def names_buckets(self) -> bool:
        return any(scheme == "s3" for scheme, _ in self._prefixes)

    def allows_address(self, text: str) -> bool:
        """Return whether a download may connect to an IP address: a public one, or one of the listed networks."""
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return False
        inner = _embedded(address)
        return any(inner in network for network in self._networks) or is_public(text)


def is_public(text: str) -> bool:
    """Return whether an IP address is a public one, and so is the IPv4 address that it may carry within."""
    try:
        # Zones, which link-local addresses have, are refused here.
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    inner = _embedded(address)
    reserved = inner in _PROTOCOLS if isinstance(inner, IPv4Address) else inner not in _UNICAST
    return inner.is_global and not inner.is_multicast and not reserved


def _embedded(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address that is embedded in an IPv6 address, or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else address)


def _network(entry: str) -> IPv4Network | IPv6Network | None:
    try:
        return ipaddress.ip_network(entry)
    except ValueError:
        return None


def _prefix(entry: str) -> tuple[str, str]:
    scheme, _, place = entry.partition("://")
    scheme = scheme.lower()
    location = location_of(scheme, place) if scheme in ("s3", "https", "file") else None
    if scheme == "hf":
        location = place.removesuffix("/")
        name = location if "/" in location else f"{location or 'any'}/any"
        location = location if is_hub_name(name) else None
    if location is None or "@" in location:
        raise ConfigError(f"--adapter-sources must be {_ENTRIES}, not {entry}.")
    return scheme, location
