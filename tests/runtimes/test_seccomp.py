"""The system-call filter, carried out by a machine of our own for every kind of call that it tells apart."""

from __future__ import annotations

import itertools
import socket
import struct

import pytest

from outrider.runtimes.inside import kernel, seccomp

ALLOW, EPERM, ENOSYS = seccomp.ALLOW, seccomp.ERRNO | 1, seccomp.ERRNO | 38
STREAM, DATAGRAM, CLOEXEC = 1, 2, 0x80000
MACHINES = sorted(seccomp.MACHINES)


def verdict(code: bytes, machine: str, number: int, first: int = 0, second: int = 0) -> int:
    """What the filter says to a call; fails when a jump leaves the program."""
    steps = list(struct.iter_unpack("HBBI", code))
    data = {
        seccomp.AT_NUMBER: number,
        seccomp.AT_MACHINE: seccomp.MACHINES.get(machine, 0),
        seccomp.AT_FIRST: first,
        seccomp.AT_SECOND: second,
    }
    loaded = at = 0
    while True:
        operation, then, otherwise, value = steps[at]
        at += 1
        if operation == seccomp.RETURN:
            return int(value)
        if operation == seccomp.LOAD:
            loaded = data[value]
        elif operation == seccomp.AND:
            loaded &= value
        else:
            holds = {
                seccomp.EQUAL: loaded == value,
                seccomp.AT_LEAST: loaded >= value,
                seccomp.ANY_BIT: bool(loaded & value),
            }[operation]
            at += then if holds else otherwise


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tcp_only", [False, True])
def test_calls_by_number(machine: str, tcp_only: bool) -> None:
    code = seccomp.program(machine, tcp_only)
    denied = {**seccomp.DENIED_EVERYWHERE, **seccomp.DENIED[machine]}
    for name, number in denied.items():
        assert verdict(code, machine, number) == EPERM, name
    special = {seccomp.CLONE[machine], seccomp.IOCTL[machine], seccomp.SOCKET[machine], seccomp.CLONE3}
    for number in set(range(450)) - set(denied.values()) - special:
        assert verdict(code, machine, number) == ALLOW, number
    assert verdict(code, machine, seccomp.CLONE3) == ENOSYS
    assert verdict(code, "another", 0) == seccomp.KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_by_argument(machine: str) -> None:
    code = seccomp.program(machine)
    clone, ioctl = seccomp.CLONE[machine], seccomp.IOCTL[machine]
    for bit in range(32):
        namespaces = (kernel.NEWNS, kernel.NEWCGROUP, kernel.NEWUTS, kernel.NEWIPC, kernel.NEWUSER, kernel.NEWPID)
        expected = EPERM if 1 << bit in (*namespaces, kernel.NEWNET) else ALLOW
        assert verdict(code, machine, clone, 1 << bit) == expected, hex(1 << bit)
    for request, expected in ((0x5412, EPERM), (0x541C, EPERM), (0x5413, ALLOW), (0x5401, ALLOW)):
        assert verdict(code, machine, ioctl, 3, request) == expected, hex(request)


@pytest.mark.parametrize("machine", MACHINES)
def test_sockets(machine: str) -> None:
    open_to_all, tcp_only = seccomp.program(machine), seccomp.program(machine, True)
    unix, internet = socket.AF_UNIX, (socket.AF_INET, socket.AF_INET6)
    for family, kind in itertools.product(range(46), (STREAM, DATAGRAM, 3, STREAM | CLOEXEC)):
        found = [verdict(code, machine, seccomp.SOCKET[machine], family, kind) for code in (open_to_all, tcp_only)]
        if family == socket.AF_NETLINK or (family in internet and kind & 0xF == STREAM):
            assert found == [ALLOW, ALLOW], (family, kind)
        elif family == unix or family in internet:
            assert found == [ALLOW, EPERM], (family, kind)
        else:
            assert found == [EPERM, EPERM], (family, kind)


def test_the_other_numbering_of_x86_64() -> None:
    code = seccomp.program("x86_64")
    assert {verdict(code, "x86_64", seccomp.X32 | number) for number in range(600)} == {ENOSYS}
