"""Under which address others reach a machine: its public one as the cloud tells it, or that of its own network."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence

import httpx
import psutil

from infra.skypilot.metadata import AWS, GCP, Metadata
from sprawl.errors import SprawlError

# Public addresses are told by different means; each returns host and port, or None where it does not apply.
Source = Callable[[int], tuple[str, int] | None]


def advertised_url(wish: str, port: int, private_ip: str, sources: Sequence[Source]) -> str:
    """The URL to register. `wish`: public, private, or a URL that is taken as it is.

    Raises SprawlError when a public address is wanted and none is found.
    """
    if wish.startswith(("http://", "https://")):
        return wish.rstrip("/")
    if wish == "private":
        return _url(private_ip, port)
    if wish != "public":
        raise SprawlError(f"SPRAWL_ADVERTISE={wish} is not known", "public, private, or a URL")
    for source in sources:
        if (found := source(port)) is not None:
            return _url(*found)
    raise SprawlError(
        "this machine does not know its public address",
        "SPRAWL_ADVERTISE=private where trainer and island share a network, else the URL that reaches it",
    )


def public_sources(environment: Mapping[str, str], metadata: Metadata) -> list[Source]:
    """Where a public address may be found, the surest first."""

    def runpod(port: int) -> tuple[str, int] | None:
        # A container behind a port map: the port outside is another one.
        host, outside = environment.get("RUNPOD_PUBLIC_IP"), environment.get(f"RUNPOD_TCP_PORT_{port}")
        return (host, int(outside)) if host and outside else None

    def cloud(port: int) -> tuple[str, int] | None:
        try:
            if metadata.cloud == AWS:
                address = metadata.get("meta-data/public-ipv4")
            elif metadata.cloud == GCP:
                address = metadata.get("instance/network-interfaces/0/access-configs/0/external-ip")
            else:
                return None
        except httpx.HTTPError:
            return None
        return (address, port) if address else None

    def own(port: int) -> tuple[str, int] | None:
        for addresses in psutil.net_if_addrs().values():
            for address in addresses:
                if is_public(address.address):
                    return address.address, port
        return None

    return [runpod, cloud, own]


def is_public(address: str) -> bool:
    """Whether this is an IPv4 address that is routed on the internet."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return parsed.version == 4 and parsed.is_global


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
