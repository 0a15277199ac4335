"""The system-call filter, run by an interpreter of the tests for every kind of call that the filter distinguishes."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
import socket
import struct

import pytest

from outrider.sandbox.runtimes.guest.isolation import seccomp, syscalls

from .world import ISOLATING, World

ALLOW, EPERM, ENOSYS = seccomp.ALLOW, seccomp.ERRNO | 1, seccomp.ERRNO | 38
STREAM, DATAGRAM, RAW, SEQPACKET = 1, 2, 3, 5
CLOEXEC, NONBLOCK = 0x80000, 0x800
FASTOPEN = 0x20000000
MACHINES = sorted(seccomp.MACHINES)
KINDS = ("x86_64", "aarch64")
LOOKED_AT = {
    "clone": (56, 220),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "ioprio_set": (251, 30),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
    "setrlimit": (160, 164),
    "socket": (41, 198),
    "socketpair": (53, 199),
}
SENDING = {"sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269)}
HOST_WIDE = {
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184),
    "mq_getsetattr": (245, 185),
}

UNCOUNTED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "remap_file_pages": (216, 234),
}


def number_of(name: str, machine: str) -> int:
    return {**LOOKED_AT, **SENDING, **HOST_WIDE}[name][KINDS.index(machine)]


def verdict(code: bytes, machine: str, number: int, *words: int) -> int:
    """Return the filter's verdict on a call with these arguments of 64 bits each. Fails if a jump leaves the
    program."""
    steps = list(struct.iter_unpack("HBBI", code))
    data = {
        seccomp.AT_NUMBER: number,
        seccomp.AT_MACHINE: seccomp.MACHINES.get(machine, 0),
    }
    for place, word in enumerate([*words, 0, 0, 0, 0, 0, 0][:6]):
        data[16 + 8 * place], data[20 + 8 * place] = word & 0xFFFFFFFF, word >> 32
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
    denied = seccomp.denied(machine)
    for name, number in denied.items():
        assert verdict(code, machine, number) == EPERM, name
    host_wide = {number_of(name, machine) for name in HOST_WIDE}
    special = {seccomp.CLONE3, *(number_of(name, machine) for name in LOOKED_AT)}
    for number in set(range(450)) - set(denied.values()) - special:
        expected = ENOSYS if tcp_only and number in host_wide else ALLOW
        assert verdict(code, machine, number, 7, 7, 7, 7) == expected, number
    assert verdict(code, machine, seccomp.CLONE3) == ENOSYS
    assert verdict(code, "another", 0) == seccomp.KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_where_memory_is_counted_there_is_none_that_belongs_to_no_process(machine: str) -> None:
    usual, code = (seccomp.program(machine, counted=counted) for counted in (False, True))
    for name in UNCOUNTED:
        number = UNCOUNTED[name][KINDS.index(machine)]
        assert (verdict(usual, machine, number), verdict(code, machine, number)) == (ALLOW, ENOSYS), name
    fcntl = (72, 25)[KINDS.index(machine)]
    for command, expected in ((1031, EPERM), (1032, ALLOW), (1033, ALLOW), (2, ALLOW), (1030, ALLOW)):
        assert verdict(usual, machine, fcntl, 3, command) == ALLOW
        assert verdict(code, machine, fcntl, 3, command) == expected, command
    without = seccomp.program(machine, counted=True, ipc=False)
    for name in HOST_WIDE:
        number = number_of(name, machine)
        assert (verdict(code, machine, number), verdict(without, machine, number)) == (ALLOW, ENOSYS), name


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_by_argument(machine: str) -> None:
    code = seccomp.program(machine)
    clone, ioctl = number_of("clone", machine), number_of("ioctl", machine)
    for bit in range(32):
        namespaces = (
            *(syscalls.NEWNS, syscalls.NEWCGROUP, syscalls.NEWUTS),
            *(syscalls.NEWIPC, syscalls.NEWUSER, syscalls.NEWPID),
        )
        expected = EPERM if 1 << bit in (*namespaces, syscalls.NEWNET) else ALLOW
        assert verdict(code, machine, clone, 1 << bit) == expected, hex(1 << bit)
    for request, expected in ((0x5412, EPERM), (0x541C, EPERM), (0x5413, ALLOW), (0x5401, ALLOW)):
        assert verdict(code, machine, ioctl, 3, request) == expected, hex(request)


@pytest.mark.parametrize("machine", MACHINES)
def test_sockets(machine: str) -> None:
    codes, number = (seccomp.program(machine), seccomp.program(machine, True)), number_of("socket", machine)
    unix, internet = socket.AF_UNIX, (socket.AF_INET, socket.AF_INET6)
    for family, kind in itertools.product(range(46), (STREAM, DATAGRAM, RAW, STREAM | CLOEXEC)):
        found = [verdict(code, machine, number, family, kind) for code in codes]
        if family == socket.AF_NETLINK or (family in internet and kind & 0xF == STREAM):
            assert found == [ALLOW, ALLOW], (family, kind)
        elif family == unix or family in internet:
            assert found == [ALLOW, EPERM], (family, kind)
        else:
            assert found == [EPERM, EPERM], (family, kind)
    for family, protocol in itertools.product(internet, (0, 6, 132, 256, 262)):
        found = [verdict(code, machine, number, family, STREAM | NONBLOCK, protocol) for code in codes]
        assert found == [ALLOW, ALLOW if protocol in (0, 6) else EPERM], (family, protocol)
    for protocol in range(32):
        expected = ALLOW if protocol in (0, 4, 15, 16) else seccomp.ERRNO | errno.EPROTONOSUPPORT
        found = [verdict(code, machine, number, socket.AF_NETLINK, RAW, protocol) for code in codes]
        assert found == [expected, expected], protocol


@pytest.mark.parametrize("machine", MACHINES)
def test_pairs_of_sockets(machine: str) -> None:
    codes, number = (seccomp.program(machine), seccomp.program(machine, True)), number_of("socketpair", machine)
    for family, kind, flags in itertools.product(range(46), range(1, 11), (0, CLOEXEC, CLOEXEC | NONBLOCK)):
        found = [verdict(code, machine, number, family, kind | flags) for code in codes]
        if family == socket.AF_UNIX:
            assert found == [ALLOW, ALLOW if kind in (STREAM, SEQPACKET) else EPERM], (kind, flags)
        else:
            assert found == [EPERM, EPERM], (family, kind)


@pytest.mark.parametrize("machine", MACHINES)
def test_no_connection_is_made_by_sending(machine: str) -> None:
    codes = (seccomp.program(machine), seccomp.program(machine, True))
    for name, place in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
        for flags in (0, FASTOPEN, FASTOPEN | 0x4000, 0x4000, ~FASTOPEN & 0xFFFFFFFF):
            words = [FASTOPEN] * place + [flags] + [FASTOPEN] * 2
            found = [verdict(code, machine, number_of(name, machine), *words) for code in codes]
            assert found == [ALLOW, EPERM if flags & FASTOPEN else ALLOW], (name, hex(flags))


@pytest.mark.parametrize("machine", MACHINES)
def test_who_else_can_be_slowed_or_limited(machine: str) -> None:
    """A program cannot change the scheduling and the limits of its sandbox's first process and of the tool server. With
    the filter for sandboxes that see the host's processes, a program can change only its own."""
    codes = (seccomp.program(machine, server=7), seccomp.program(machine, True))
    for name in ("sched_setscheduler", "sched_setparam", "sched_setattr", "sched_setaffinity"):
        for pid, expected in ((0, [ALLOW, ALLOW]), (1, [EPERM, EPERM]), (7, [EPERM, EPERM]), (8, [ALLOW, EPERM])):
            for word in (pid, pid | 5 << 32):  # the kernel reads only 32 bits
                assert [verdict(code, machine, number_of(name, machine), word) for code in codes] == expected, name
    for name, kinds in (("setpriority", (0, 1, 2)), ("ioprio_set", (1, 2, 3))):
        for kind, who in itertools.product(kinds, (0, 1, 7, 8)):
            expected = [ALLOW if who in (0, 8) else EPERM, ALLOW if who == 0 else EPERM]
            expected = [EPERM, EPERM] if kind == kinds[-1] else expected  # by user id: any number of processes
            assert [verdict(code, machine, number_of(name, machine), kind, who) for code in codes] == expected
    for pid, new in itertools.product((0, 1, 7, 8), (0, 0x7FFF12345678, 0x7FFF00000000, 0x1000)):
        expected = [ALLOW if pid in (0, 8) or not new else EPERM, ALLOW if pid == 0 or not new else EPERM]
        found = [verdict(code, machine, number_of("prlimit64", machine), pid, 7, new, 1) for code in codes]
        assert found == expected, (pid, hex(new))


REACH = """
import ctypes, os, resource, struct
libc, failed = ctypes.CDLL(None), []
def tried(done):
    failed.append(not done)
for pid in {1, TOOLS}:
    for call in (lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
                 lambda: os.sched_setparam(pid, os.sched_param(0)),
                 lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)),
                 lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
                 lambda: os.setpriority(os.PRIO_USER, 0, 19),
                 lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (10, 10))):
        try:
            call()
            tried(True)
        except OSError:
            tried(False)
    tried(libc.syscall(IOPRIO_SET, 1, pid, 3 << 13) == 0)
    tried(libc.syscall(SCHED_SETATTR, pid, struct.pack("IIQiIQQQ", 48, 5, 0, 0, 0, 0, 0, 0), 0) == 0)
    resource.prlimit(pid, resource.RLIMIT_NOFILE)
print(all(failed), failed)
"""


@pytest.mark.parametrize("kind", ISOLATING)
async def test_the_first_process_is_let_alone(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    tools = (await sandbox.exec("echo $PPID", seconds=10)).stdout.decode().strip()
    machine = os.uname().machine
    program = REACH.replace("TOOLS", tools)
    for name in ("ioprio_set", "sched_setattr"):
        program = program.replace(name.upper(), str(number_of(name, machine)))
    result = await sandbox.exec(["python3", "-c", program], seconds=20)
    assert result.stdout.startswith(b"True"), (result.stdout, result.stderr)
    own = (
        "! command -v renice || renice -n 19 -p $$",
        "ulimit -n 50 && test $(ulimit -n) = 50",
        "python3 -c 'import os; os.nice(3); os.setpriority(os.PRIO_PROCESS, os.getpid(), 19)'",
        "! command -v taskset || { taskset -c 0 true && taskset -p 1 $$; }",
        "python3 -c 'import os, resource; p = os.getpid(); resource.prlimit(p, resource.RLIMIT_NOFILE, (9, 9))'",
    )
    for command in own:
        result = await sandbox.exec(command, seconds=20)
        assert result.exit_code == 0, (command, result.stderr)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_limit_of_core_dumps_stays_and_whoever_sets_it_is_told_that_it_changed(machine: str) -> None:
    codes, done = (seccomp.program(machine), seccomp.program(machine, True)), seccomp.ERRNO | 0
    for kind in range(16):
        for number, words in (("setrlimit", (kind, 0x1000)), ("prlimit64", (0, kind, 0x1000))):
            found = [verdict(code, machine, number_of(number, machine), *words) for code in codes]
            assert found == [done if kind == resource.RLIMIT_CORE else ALLOW] * 2, (number, kind)
        assert verdict(codes[0], machine, number_of("prlimit64", machine), 0, kind, 0, 0x1000) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_no_file_is_leased(machine: str) -> None:
    for code in (seccomp.program(machine), seccomp.program(machine, True), seccomp.program(machine, counted=True)):
        for command in range(1024, 1044):
            found = verdict(code, machine, number_of("fcntl", machine), 3, command)
            assert (found == EPERM) >= (command in (fcntl.F_SETLEASE, 1040)), command
            assert found in (ALLOW, EPERM)


ONE_CRASH = """
import fcntl, os, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
assert resource.getrlimit(resource.RLIMIT_CORE) == (BYTES, BYTES), resource.getrlimit(resource.RLIMIT_CORE)
try:
    fcntl.fcntl(os.open("leased", os.O_CREAT), fcntl.F_SETLEASE, fcntl.F_WRLCK)
except PermissionError:
    print("fine")
"""


@pytest.mark.parametrize("kind", [*ISOLATING, "process-landlock"])
async def test_a_crash_starts_no_program_of_the_host_and_a_file_keeps_nobody_waiting(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    program = ONE_CRASH.replace("BYTES", str(seccomp.core_limit()))
    result = await sandbox.exec(["python3", "-c", program], seconds=20)
    assert result.stdout == b"fine\n", result.stderr


def test_the_other_numbering_of_x86_64() -> None:
    code = seccomp.program("x86_64")
    assert {verdict(code, "x86_64", seccomp.X32 | number) for number in range(600)} == {ENOSYS}
