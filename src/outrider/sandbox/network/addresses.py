"""Detects IP addresses that belong to this machine or to a private network, in any notation.

The functions connect to nothing. They ask the kernel for its routes at each call, so they also detect addresses that
this machine gets later.
"""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

EMBEDDING = tuple(
    (IPv6Network(network), shift)
    for network, shift in (
        ("::/96", 0),  # IPv4-compatible, RFC 4291
        ("::ffff:0:0:0/96", 0),  # IPv4-translated, RFC 2765
        ("64:ff9b::/96", 0),  # NAT64, RFC 6052
        ("64:ff9b:1::/96", 0),  # NAT64 of a site, RFC 8215
        ("2002::/16", 80),  # 6to4
    )
)
"""IPv6 networks whose addresses contain an IPv4 address, and the number of bits to the right of it."""
ISATAP = 0x5EFE
NETLINK_ROUTE, RTM_GETROUTE, NLM_F_REQUEST, RTA_DST = 0, 26, 1, 1
HEADER, ROUTE, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBBBBBI"), struct.Struct("=HH")
LOCAL, ANYCAST = 2, 4
"""Route types of the kernel (RTN_LOCAL, RTN_ANYCAST) for this machine's own addresses."""
ANSWER_SECONDS = 1.0
METADATA = frozenset(
    map(
        ip_address,
        ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:42::42", "fd00:ec2::254", "fd20:ce::254"),
    )
)
"""Addresses at which clouds give credentials to a machine. `is_sensitive` also covers 169.254.169.254, which is
link-local."""


def plain(address: Address) -> Address:
    """Return the address without its zone (`%eth0`). An IPv4-mapped address (`::ffff:1.2.3.4`) becomes an IPv4
    address."""
    if isinstance(address, IPv4Address):
        return address
    return address.ipv4_mapped or IPv6Address(int(address))


def embedded_addresses(address: Address) -> tuple[Address, ...]:
    """Return the address itself and all IPv4 addresses that it contains. A packet to `address` may reach any of
    them."""
    if isinstance(address, IPv4Address):
        return (address,)
    number = int(address)
    found: list[Address] = [address]
    found += [IPv4Address(number >> shift & 0xFFFFFFFF) for network, shift in EMBEDDING if address in network]
    if (number >> 32) & 0xFCFFFFFF == ISATAP:
        found.append(IPv4Address(number & 0xFFFFFFFF))
    return (*found, *(address.teredo or ()))


def is_sensitive(address: Address) -> bool:
    """Return True for a link-local, multicast or unspecified address, and for a cloud's metadata service, in any
    notation. Such an address may give out credentials or reach several machines."""
    return any(
        one.is_link_local or one.is_multicast or one.is_unspecified or one in METADATA
        for one in embedded_addresses(plain(address))
    )


def is_public(address: Address) -> bool:
    """Return True for an address on the public Internet, unless it belongs to this machine. Returns False for a private
    address in any notation."""
    found = embedded_addresses(plain(address))
    return not is_sensitive(address) and all(one.is_global for one in found) and not any(map(is_own, found))


def is_own(address: Address) -> bool:
    """Return True if the kernel would deliver a packet to this address on this machine."""
    if address.is_loopback or address.is_unspecified:  # on Linux, 0.0.0.0 leads to this machine
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        return _route_type(family, address.packed) in (LOCAL, ANYCAST)
    except OSError:  # A system-call filter may block netlink. Then try to bind, which works only for own addresses.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((str(address), 0))
            except OSError:
                return False
        return True


def _route_type(family: int, packed: bytes) -> int | None:
    """Ask the kernel for the route to an address, and return its type. Returns None if there is no route. Raises
    OSError."""
    body = ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0) + ATTRIBUTE.pack(4 + len(packed), RTA_DST) + packed
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_ROUTE) as kernel:
        kernel.settimeout(ANSWER_SECONDS)
        kernel.send(HEADER.pack(HEADER.size + len(body), RTM_GETROUTE, NLM_F_REQUEST, 1, 0) + body)
        answer = kernel.recv(8192)
    _, kind, *_ = HEADER.unpack_from(answer)
    if kind != RTM_GETROUTE - 2:  # RTM_NEWROUTE is RTM_GETROUTE - 2; any other message is an error
        return None
    return int(ROUTE.unpack_from(answer, HEADER.size)[7])
