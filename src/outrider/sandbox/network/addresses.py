"""Detects addresses that lead to this machine or to a private network, in any notation.

No connection is opened. Invariant: the result reflects the kernel's routing tables at the time of the call, so
addresses added to the machine later are covered.
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
"""IPv6 networks whose addresses contain an IPv4 address, each with the number of bits after the IPv4 address."""
ISATAP = 0x5EFE
NETLINK_ROUTE, RTM_GETROUTE, NLM_F_REQUEST, RTA_DST = 0, 26, 1, 1
HEADER, ROUTE, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBBBBBI"), struct.Struct("=HH")
LOCAL, ANYCAST = 2, 4
"""Types of routes to this machine."""
ANSWER_SECONDS = 1.0
METADATA = frozenset(
    map(
        ip_address,
        ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:42::42", "fd00:ec2::254", "fd20:ce::254"),
    )
)
"""Addresses at which clouds serve a machine's credentials, in addition to the link-local 169.254.169.254."""


def plain(address: Address) -> Address:
    """Return the address without its zone. For an IPv4-mapped address, which is only another notation of an IPv4
    address, return the IPv4 address."""
    if isinstance(address, IPv4Address):
        return address
    return address.ipv4_mapped or IPv6Address(int(address))


def meanings(address: Address) -> tuple[Address, ...]:
    """Return the addresses that a packet to `address` may reach: the address itself and any IPv4 addresses in it."""
    if isinstance(address, IPv4Address):
        return (address,)
    number = int(address)
    found: list[Address] = [address]
    found += [IPv4Address(number >> shift & 0xFFFFFFFF) for network, shift in EMBEDDING if address in network]
    if (number >> 32) & 0xFCFFFFFF == ISATAP:
        found.append(IPv4Address(number & 0xFFFFFFFF))
    return (*found, *(address.teredo or ()))


def is_sensitive(address: Address) -> bool:
    """Return True for an address that gives credentials or reaches several machines: link-local, multicast, or a
    cloud's metadata service, in any notation."""
    return any(
        one.is_link_local or one.is_multicast or one.is_unspecified or one in METADATA
        for one in meanings(plain(address))
    )


def is_public(address: Address) -> bool:
    """Return True for an address of the public Internet that is not this machine's own. Returns False for private
    addresses in any notation."""
    found = meanings(plain(address))
    return not is_sensitive(address) and all(one.is_global for one in found) and not any(map(is_own, found))


def is_own(address: Address) -> bool:
    """Return True if the kernel would deliver a packet to this address on this machine."""
    if address.is_loopback or address.is_unspecified:  # Linux treats 0.0.0.0 as this machine, too
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        return _route_type(family, address.packed) in (LOCAL, ANYCAST)
    except OSError:  # A system-call filter may block netlink. A socket can be bound only to an address of this machine.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((str(address), 0))
            except OSError:
                return False
        return True


def _route_type(family: int, packed: bytes) -> int | None:
    """Return the type of the route to an address, or None if there is none. Raises OSError."""
    body = ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0) + ATTRIBUTE.pack(4 + len(packed), RTA_DST) + packed
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_ROUTE) as kernel:
        kernel.settimeout(ANSWER_SECONDS)
        kernel.send(HEADER.pack(HEADER.size + len(body), RTM_GETROUTE, NLM_F_REQUEST, 1, 0) + body)
        answer = kernel.recv(8192)
    _, kind, *_ = HEADER.unpack_from(answer)
    if kind != RTM_GETROUTE - 2:  # anything but RTM_NEWROUTE is an error: there is no route
        return None
    return int(ROUTE.unpack_from(answer, HEADER.size)[7])
