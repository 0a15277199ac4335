"""The zygote: a tool server that is loaded but not yet confined. All namespace sandboxes of a node are forked from it.

Forking is faster than starting a program, shares memory, and needs no interpreter in the sandbox. The zygote is a
separate program, which `python -I -S -c` starts with one end of a socket as its standard input. Its environment
contains only the node's mark. Invariants: the zygote has one thread and never runs a sandbox's programs. It exits when
its socket ends. Whenever it exits, all its sandboxes are killed.

A request is one message with a number and three descriptors: a file with the plan (see isolate.py), the tool server's
connection, and the file for the server's standard error. The reply is `[number, pid, error]`. If there is no error, it
also has a pidfd.
"""

from __future__ import annotations

import _socket
import array
import gc
import os
import platform
import signal
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.filesystem.layers import save_layers
from outrider.sandbox.runtimes.guest.isolation import isolate, seccomp, syscalls
from outrider.sandbox.runtimes.guest.msgpack import Unpacker, pack
from outrider.sandbox.runtimes.guest.poll_loop import POLL_READ, Loop
from outrider.sandbox.runtimes.guest.server import close_others, preload, serve

if TYPE_CHECKING:
    from typing import Any

FAILED = 125
"""Exit code of a child that could not become a sandbox. The reason is in the child's standard error."""


class Zygote:
    """Handles one request after another, and collects the exit codes of the forked children."""

    def __init__(self, loop: Loop, control: _socket.socket) -> None:
        self.loop = loop
        self.control = control
        loop.watch(control.fileno(), POLL_READ, self._ready)

    def _ready(self, events: int) -> None:
        message, ancillary, _, _ = self.control.recvmsg(8, _socket.CMSG_SPACE(12), _socket.MSG_CMSG_CLOEXEC)
        if not message:
            self.loop.stop()
            return
        given = array.array("i")
        for _, _, data in ancillary:
            given.frombytes(data)
        number = int.from_bytes(message, "big")
        try:
            self._answer(number, self._fork(*given))
        except OSError as error:
            self._send([number, 0, str(error)])
        finally:
            for fd in given:
                os.close(fd)

    def _fork(self, file: int, connection: int, log: int) -> int:
        plan = Unpacker(os.pread(file, os.fstat(file).st_size, 0)).value()
        if len(plan["uids"]) == 1:
            return self._clone(plan, connection, log)
        # The child waits on this pipe until the zygote has mapped the sandbox's users. Only a process outside the
        # child's user namespace may map several users.
        mapped_reader, mapped_writer = os.pipe()
        try:
            pid = self._clone(plan, connection, log, mapped_reader, mapped_writer)
            give_users(pid, plan)
            os.write(mapped_writer, b"x")
        finally:
            os.close(mapped_reader)
            os.close(mapped_writer)
        return pid

    def _clone(
        self, plan: dict[str, Any], connection: int, log: int, mapped_reader: int = -1, mapped_writer: int = -1
    ) -> int:
        bare = isolate.bare_layers(plan)
        try:
            pid = syscalls.clone(syscalls.NEWUSER | syscalls.NEWPID)
            if pid == 0:
                become_sandbox(plan, connection, log, bare, mapped_reader, mapped_writer)
        finally:
            for tree in bare.values():
                os.close(tree)
        self.loop.exits[pid] = lambda code: None
        return pid

    def _answer(self, number: int, pid: int) -> None:
        # the pid is still valid, because the loop collects exit codes only after this handler
        pidfd = os.pidfd_open(pid)
        try:
            self._send([number, pid, ""], pidfd)
        finally:
            os.close(pidfd)

    def _send(self, answer: list[object], *fds: int) -> None:
        packed = bytearray()
        pack(answer, packed)
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.control.sendmsg([packed], rights)


def give_users(pid: int, plan: dict[str, Any]) -> None:
    """Map several users into the child's user namespace. A zygote that runs as root writes the maps itself. Otherwise
    the programs newuidmap and newgidmap write them, within the ranges in /etc/subuid and /etc/subgid. If this raises
    OSError, the caller closes the child's pipe, and the child exits."""
    for kind in ("uid", "gid"):
        ids = plan[f"{kind}s"]
        if os.geteuid() == 0:
            isolate.write(f"/proc/{pid}/{kind}_map", isolate.mapping(ids))
            continue
        program = plan["mappers"][kind]
        words = [program, str(pid), *(str(number) for line in ids for number in line)]
        mapper = os.posix_spawn(program, words, {})
        if os.waitpid(mapper, 0)[1] != 0:
            raise OSError(f"{' '.join(words)} failed")


def become_sandbox(
    plan: dict[str, Any], connection: int, log: int, bare: dict[int, int], mapped_reader: int, mapped_writer: int
) -> None:
    """Confine this process, and serve as the sandbox's tool server. The process is the first one of its pid namespace.
    Never returns."""
    code = FAILED
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel kills the sandbox when the zygote exits
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for source, target in ((null, 0), (null, 1), (log, 2)):
            os.dup2(source, target)
        if mapped_reader >= 0:
            os.close(mapped_writer)
            if not os.read(mapped_reader, 1):
                raise OSError("the users of the sandbox could not be mapped")
        close_others({0, 1, 2, connection, *bare.values()})
        signal.set_wakeup_fd(-1)
        gateway = os.open(plan["gateway"], os.O_PATH) if plan["gateway"] else -1
        layers = isolate.enter(plan, bare)
        serve(connection, save_layers=lambda out: save_layers(out, layers), gateway=gateway)
        code = 0
    except BaseException as error:  # whatever the error is, the child must not continue as a second zygote
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def main() -> None:
    """Serve requests from the socket on descriptor 0 until it ends."""
    preload()
    # Fill the cache of `seccomp.program`, because the forks inherit the cache. The arguments must be exactly those that
    # `confine` uses.
    for counted, ipc in ((False, True), (True, True), (True, False)):
        seccomp.program(platform.machine(), False, 1, counted=counted, ipc=ipc)
    syscalls.rename_process(b"outrider-sandbox")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)
    control = _socket.socket(fileno=os.dup(0))
    control.setblocking(True)
    loop = Loop()
    Zygote(loop, control)
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would otherwise write to every shared page, and so copy it
    loop.run()
