"""The kinds whose sandboxes run on other machines. Such a sandbox keeps running if its node is killed.

Invariant: a kind is imported only if the operator has set it up.
"""

from __future__ import annotations

from outrider.config import PodsConfig
from outrider.environment import environment
from outrider.plugins import resolve
from outrider.sandbox.runtimes.node_host import Host

ELSEWHERE = ("e2b", "kubernetes")
"""Names of the kinds whose sandboxes run on other machines. The class of each kind has an attribute `part` (see
`RuntimeKind`)."""


def is_set_up(kind: str, host: Host) -> bool:
    """Return whether the operator has set up a kind. `e2b` is set up by the API key in an environment variable, and
    `kubernetes` by the service's settings. A kubeconfig is not enough, because its cluster may not be meant for
    sandboxes."""
    return bool(environment("E2B_API_KEY")) if kind == "e2b" else host.pods != PodsConfig()


async def join_services(host: Host) -> None:
    """Connect to the services that are set up. Each connection first removes the sandboxes that dead nodes of this
    machine left at the service. `Host.sweep` later repeats this removal. Raises RuntimeFailure."""
    for kind in ELSEWHERE:
        if is_set_up(kind, host):
            await host.part(resolve("runtime", kind).part)
