"""The node's side of the zygote. The zygote is the process from which namespace sandboxes are forked.

guest/isolation/zygote.py has the zygote's own code. Invariant: a forked process is either returned to the caller or, if
the caller was cancelled, killed.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.kernel.child import Child
from outrider.sandbox.runtimes.kernel.mounts import MountTable
from outrider.sandbox.runtimes.kernel.process_marks import VARIABLE
from outrider.sandbox.runtimes.namespace.plan import Plan, host_root, make_skeleton
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.runtimes.tool_server.launch import connection

ANSWER_MAX = 1 << 16
ANSWER_SECONDS = 30.0
"""Maximum seconds in which the zygote must answer a request. A fork usually takes a few milliseconds, but a request may
also wait for the zygote's own start and for earlier requests."""
STOP_SECONDS = 5.0
PAUSE_SECONDS = 0.001
BOOT = """
import sys, types
for name in ("outrider", "outrider.sandbox", "outrider.sandbox.runtimes"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
from outrider.sandbox.runtimes.guest.isolation.zygote import main
main()
"""
"""Python code that starts the zygote. Empty modules take the place of the parent packages, because the real ones import
packages that are missing under `-I -S`."""


class ForkReply(msgspec.Struct, frozen=True, array_like=True):
    """The zygote's reply to request `number`: the forked process, or the error that prevented the fork."""

    number: int
    pid: int
    error: str


class ZygoteClient:
    """Runs the zygote of a node. All sandboxes of the node share this object (see node_host.py).

    - `host_root` is a root made of the host's own system folders.
    - `base` is an empty folder, at which each sandbox mounts its root.
    - `mounts` returns the mounts of this machine.

    When the zygote exits, all sandboxes that were forked from it also exit. The next call of `fork` then starts a new
    zygote. If the zygote was stopped by a signal, the next call also starts a new one, and the stopped zygote's
    sandboxes go on."""

    def __init__(self, host: Host) -> None:
        self._folder = host.folder
        self.base = host.folder / "base"
        self._child: Child | None = None
        self._given_up: list[Child] = []
        self._stopped: list[tuple[Child, socket.socket]] = []
        """Zygotes that were stopped by a signal, with their connections. A zygote lives as long as its connection."""
        self._number = 0
        self._waiting: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._spares: list[int] = []
        """One open descriptor for each expected reply. Just before a reply is read, one of these descriptors is closed,
        to make room for the pidfd sent with the reply: the kernel drops a descriptor for which there is no room."""
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        self.base.mkdir(exist_ok=True)
        self.host_root = host_root((await shielded(lambda: asyncio.to_thread(_skeleton, self._folder))).resolve())
        self._table = MountTable()
        self.mounts = self._table.mounts
        self._spawn()
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._give_up()
        while self._stopped:
            child, control = self._stopped.pop()
            control.close()
            self._given_up.append(child)
        self._table.close()
        await shielded(self._await_deaths)

    async def _await_deaths(self) -> None:
        """Wait until the abandoned zygotes have exited. All sandboxes that were forked from them exit with them."""
        while self._given_up:
            await self._given_up.pop().end(STOP_SECONDS)

    def _spawn(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", BOOT, str(Path(__file__).parents[4])]
        with connection(socket.SOCK_SEQPACKET) as (ours, theirs):
            self._child = Child.spawn(command, {VARIABLE: f"{self._folder.name}/"}, theirs)
        ours.setblocking(False)
        self._control = ours
        self._loop.add_reader(ours.fileno(), self._ready)

    async def fork(self, plan: Plan, tool_server: socket.socket) -> tuple[Child, Callable[[], Awaitable[bool]]]:
        """Fork a new sandbox. Its tool server uses the socket `tool_server`. Returns the sandbox's process, and a
        function that returns whether the zygote from which this process was forked still runs. Raises RuntimeFailure,
        also if the zygote does not answer within ANSWER_SECONDS. Raises OSError if no descriptors are left."""
        if self._child is None:
            await shielded(self._await_deaths)
        if self._child is None:  # another call may have started a zygote meanwhile
            self._spawn()
        maker = self._child
        with contextlib.ExitStack() as undo, os.fdopen(os.memfd_create("plan"), "wb", buffering=0) as file:
            log = os.memfd_create("stderr")
            undo.callback(os.close, log)
            file.write(msgspec.msgpack.encode(msgspec.to_builtins(plan)))
            self._spares.append(os.dup(log))
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    pid, pidfd = await self._request(file.fileno(), tool_server.fileno(), log)
            except TimeoutError as error:
                message = f"the process that makes sandboxes has not answered within {ANSWER_SECONDS:g} s"
                if maker is not None and maker is self._child and maker.stopped_by_signal():
                    self._stopped.append((maker, self._control))
                    self._forget(f"{message}: a signal has stopped it")
                raise RuntimeFailure(message) from error
            undo.pop_all()

        async def maker_lives() -> bool:
            """Return whether the zygote of this sandbox still runs. Waits briefly, because a zygote's exit also ends
            the sandbox, and the sandbox's exit may be noticed first."""
            if maker is None or not self._keeps(maker) or await maker.ends_within(PAUSE_SECONDS):
                return False
            return self._keeps(maker)  # another task may have abandoned the zygote meanwhile

        return Child(pid, pidfd, log), maker_lives

    def _keeps(self, zygote: Child) -> bool:
        return zygote is self._child or any(zygote is child for child, _ in self._stopped)

    async def _request(self, *fds: int) -> tuple[int, int]:
        self._number += 1
        number = self._number
        answer: asyncio.Future[tuple[int, int]] = self._loop.create_future()
        self._waiting[number] = answer
        try:
            await self._send(number, answer, *fds)
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(_discard)
            raise

    async def _send(self, number: int, answer: asyncio.Future[tuple[int, int]], *fds: int) -> None:
        """Send the request, and wait while the socket is full. If the connection is lost, the zygote is abandoned. Any
        other error fails only this request."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            while not answer.done():
                try:
                    self._control.sendmsg([number.to_bytes(8, "big")], rights)
                except BlockingIOError:
                    await asyncio.sleep(PAUSE_SECONDS)
                else:
                    return
        except (BrokenPipeError, ConnectionResetError):
            self._give_up()
        except BaseException:  # BaseException includes CancelledError
            self._waiting.pop(number, None)
            if self._spares:
                os.close(self._spares.pop())
            raise

    def _ready(self) -> None:
        if self._spares:
            os.close(self._spares.pop())
        try:
            message, fds, _, _ = socket.recv_fds(self._control, ANSWER_MAX, 1)
        except OSError:
            message, fds = b"", []
        if not message:
            self._give_up()
            return
        reply = msgspec.msgpack.decode(message, type=ForkReply)
        answer = self._waiting.pop(reply.number)
        if reply.error or not fds:
            fault = reply.error or "no descriptor is left for its process"
            answer.set_exception(RuntimeFailure(f"the sandbox cannot be forked: {fault}"))
        else:
            answer.set_result((reply.pid, fds[0]))

    def _give_up(self) -> None:
        """Abandon the zygote. Close the connection, so that the zygote exits, and let the pending requests fail."""
        if self._child is None:
            return
        self._given_up.append(self._child)
        self._forget("the process that makes sandboxes is gone")
        self._control.close()

    def _forget(self, reason: str) -> None:
        """Fork no more sandboxes from the zygote, and let the pending requests fail with this reason."""
        assert self._child is not None
        self._loop.remove_reader(self._control.fileno())
        tail = self._child.log_tail() or None
        self._child = None
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(RuntimeFailure(reason, log_tail=tail))
        while self._spares:
            os.close(self._spares.pop())


def _skeleton(folder: Path) -> Path:
    """Return the folder `skeleton` in `folder`. If it is missing, it is made under another name and then renamed. So
    the folder `skeleton` is always complete, even if another process makes it concurrently, or a process is killed
    while making it. The call blocks."""
    skeleton = folder / "skeleton"
    if not skeleton.exists():
        with tempfile.TemporaryDirectory(prefix="skeleton-", dir=folder) as half:
            made = Path(half, "root")
            make_skeleton(made)
            try:
                made.rename(skeleton)
            except OSError:
                if not skeleton.exists():  # another process may have made it meanwhile
                    raise
    return skeleton


def _discard(answer: asyncio.Future[tuple[int, int]]) -> None:
    """Kill the process that was forked for a request whose caller was cancelled."""
    if answer.exception() is None:
        _, pidfd = answer.result()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
