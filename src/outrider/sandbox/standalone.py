"""Opens a single sandbox without a service: `open_sandbox`.

Invariant: at the end of the `with` block, the sandbox is stopped, and all its files and processes are gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from outrider.concurrency.cancellation import opened_in_thread, shielded
from outrider.concurrency.chores import Chores
from outrider.destinations import Phase
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.network.rules import NetworkRules
from outrider.sandbox.node_folder import NodeFolder
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.sandbox import Sandboxes
from outrider.spec import RuntimeSpec


@asynccontextmanager
async def open_sandbox(
    spec: RuntimeSpec,
    *,
    paths: HostPaths | None = None,
    gateway: Callable[[Path], AbstractAsyncContextManager[None]] | None = None,
    network: NetworkRules | None = None,
) -> AsyncIterator[Runtime]:
    """Start a sandbox and run the prepare steps of `spec`. The sandbox is stopped at the end of the `with` block.

    `paths`: the files of this machine that `spec` may name. By default, none.
    `gateway`: starts a server at a Unix socket, which the sandbox reaches at `Runtime.endpoint`. By default, the
        sandbox has no model endpoint.
    `network`: the destinations that `spec` may name. By default, none. In the `with` block, the sandbox has the network
        of the agent's phase.

    Raises InvalidField and RuntimeUnavailable for a spec that cannot work on this machine, and RuntimeFailure if the
    start or a prepare step fails.
    """
    async with (
        opened_in_thread(NodeFolder.make, NodeFolder.remove) as folder,
        Host(folder.path) as host,
        Chores(host.failures) as background,
    ):
        socket = folder.path / "gateway.sock"
        if gateway is None:
            socket.touch()  # a file instead of a socket, because there is no server
        async with nullcontext() if gateway is None else gateway(socket):
            sandboxes = Sandboxes(
                host=host, background=background, paths=paths or HostPaths(), gateway_socket=socket, network=network
            )
            sandbox = await sandboxes.make(spec, "alone", 1)
            try:
                await sandbox.ready()
                async with sandbox.network(Phase.AGENT):
                    yield sandbox.runtime
            finally:
                await shielded(sandbox.stop)
