"""The kinds whose sandboxes run on other machines. Such a sandbox keeps running when its node is killed.

Invariant: a kind that the operator has not set up is not imported.
"""

from __future__ import annotations

from outrider.config import PodsConfig
from outrider.environment import environment
from outrider.plugins import resolve
from outrider.sandbox.runtimes.node_host import Host

ELSEWHERE = ("e2b", "kubernetes")
"""Names of the kinds whose sandboxes run on other machines. The class of each kind has an attribute `part` (see
`Host.part`)."""


def is_set_up(kind: str, host: Host) -> bool:
    """Return whether the operator has set up a kind. A variable with a key sets up `e2b`. Settings set up `kubernetes`,
    because a kubeconfig alone does not mean that the cluster is for sandboxes."""
    return bool(environment("E2B_API_KEY")) if kind == "e2b" else host.pods != PodsConfig()


async def join_services(host: Host) -> None:
    """Connect to the services that are set up. Each connection removes the sandboxes that this machine's dead nodes
    left at the service, and `Host.sweep` later repeats the removal. Raises RuntimeFailure."""
    for kind in ELSEWHERE:
        if is_set_up(kind, host):
            await host.part(resolve("runtime", kind).part)
