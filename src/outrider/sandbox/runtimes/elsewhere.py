"""The kinds whose sandboxes run on other machines. Such a sandbox outlives a node that is killed.

Invariant: a kind that the operator has not set up is not imported.
"""

from __future__ import annotations

from outrider.config import PodsConfig
from outrider.environment import environment
from outrider.plugins import resolve
from outrider.sandbox.runtimes.node_host import Host

ELSEWHERE = {"e2b": "E2B_API_KEY"}
"""The variable that sets up each kind. Settings set up the kind `kubernetes`. The class of a kind has a `part`: see
`Host.part`."""


async def join_services(host: Host) -> None:
    """Connect to the services that are set up, and remove the sandboxes of this machine's dead nodes there. The sweeps
    of the host repeat the removal. Raises RuntimeFailure."""
    for name, variable in ELSEWHERE.items():
        if environment(variable):
            await host.part(resolve("runtime", name).part)
    if host.pods != PodsConfig():  # a kubeconfig alone does not mean that the cluster is for sandboxes
        await host.part(resolve("runtime", "kubernetes").part)
