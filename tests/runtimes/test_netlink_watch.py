"""The kernel's memory for a sandbox's netlink sockets. No control group counts it, so the tool server limits it."""

from __future__ import annotations

import pytest

from outrider.sandbox.runtimes.guest import netlink_watch
from outrider.spec import Resources

from .world import ISOLATING, World

TABLE = b"""\
sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode
00000000336c5fd2 0   0          00000000 0        0        0     2        0        4
00000000625b8182 0   4294966294 00000000 212992   64       0     2        7        1576
"""
FILL = """
import resource, socket, struct, time
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
question = struct.pack("=IHHII", 32, 18, 1, 1, 0) + struct.pack("=BxHiII", 0, 0, 1, 0, 0)
asked, end = [], time.monotonic() + 60
while time.monotonic() < end:
    one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    one.bind((0, 0))
    for _ in range(1000):
        one.send(question)
    asked.append(one)
"""
ASK = """
import socket
assert any(name == "lo" for _, name in socket.if_nameindex())
print("fine")
"""


def test_the_kernels_table_is_added_up() -> None:
    assert netlink_watch.held_bytes(TABLE) == 212992 + 64
    assert netlink_watch.held_bytes(b"") == 0


@pytest.mark.deep
@pytest.mark.parametrize("kind", ISOLATING)
async def test_whoever_lets_the_kernel_keep_answers_is_ended(world: World, kind: str) -> None:
    sandbox = await world.start(kind, resources=Resources(memory_mb=128))
    assert (await sandbox.exec(["python3", "-c", ASK], seconds=20)).stdout == b"fine\n"
    result = await sandbox.exec(["python3", "-c", FILL], seconds=90)
    assert result.exit_code == 128 + 9, result.stderr
    assert (await sandbox.exec(["python3", "-c", ASK], seconds=20)).stdout == b"fine\n"
