"""One sandbox without a service: `open_sandbox`.

Invariant: when the block ends, the sandbox is stopped, and no file or process of the sandbox is left on the machine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from outrider.concurrency.cancellation import opened_in_thread, shielded
from outrider.concurrency.chores import Chores, Failures
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
    """Start a sandbox, run the prepare steps of `spec`, and stop the sandbox when the block ends.

    `paths`: the files of this machine that `spec` may name; by default none.
    `gateway`: opens a server at a Unix socket, to which `Runtime.endpoint` leads. By default the sandbox has no model
        endpoint.
    `network`: the rules for the destinations that `spec` may name; by default none are allowed. In the block, the
        sandbox has the network of the agent's phase.

    Raises InvalidField and RuntimeUnavailable for a spec that cannot work here, RuntimeFailure for a failed start or
    prepare step, and whatever the block raises.
    """
    async with (
        opened_in_thread(NodeFolder.make, NodeFolder.remove) as folder,
        Host(folder.path) as host,
        Chores(Failures()) as background,
    ):
        socket = folder.path / "gateway.sock"
        if gateway is None:
            socket.touch()  # no server listens
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
