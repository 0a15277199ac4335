"""Computes the network of a Harbor task's sandboxes, for the agent and for the verifier.

The module is pure. In Harbor, the agent and the verifier have the network of their environment, unless they set their
own. A public network becomes `*`, or the destinations that the caller chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.destinations import Destination
from outrider.errors import InvalidField
from outrider.tasks.harbor.schema import NO_NETWORK, HarborStep, Network, TaskToml

PUBLIC = ("*",)


class NoDestination(ValueError):
    """A list of allowed hosts has an invalid entry. `field` is the path of this entry within the table of the
    network."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


def destinations(network: Network, public: Sequence[str]) -> list[str]:
    """Return the destinations of a network. Its mode must not be None. Raises NoDestination."""
    if network.network_mode == NO_NETWORK:
        return []
    if network.network_mode == "public":
        return list(public)
    hosts = network.allowed_hosts or []
    for number, host in enumerate(hosts):
        try:
            if Destination.read(host).mirror:
                raise ValueError("a mirror is no host")
        except ValueError as error:
            raise NoDestination(f"allowed_hosts.{number}", str(error)) from error
    return hosts


def network_of(
    environment: Network, public: Sequence[str], *, agent: Network | None = None, verifier: Network | None = None
) -> dict[str, Any] | None:
    """Return the field `runtime.network` of a sandbox, or None if it has no destination. Raises NoDestination."""
    found: dict[str, Any] = {"allow": destinations(environment, public)}
    for name, own in (("agent", agent), ("verifier", verifier)):
        if own is not None and own.network_mode is not None and (listed := destinations(own, public)) != found["allow"]:
            found[name] = listed
    return found if any(found.values()) else None


def of_step(config: TaskToml, step: HarborStep | None) -> tuple[Network, Network]:
    """Return the agent's and the verifier's network in a step. The networks that the step sets take precedence over the
    task's."""
    agent: Network = config.agent
    verifier: Network = config.verifier
    if step is not None:
        agent = step.agent if step.agent.network_mode is not None else agent
        verifier = step.verifier if step.verifier.network_mode is not None else verifier
    return agent, verifier


def check_steps(config: TaskToml) -> None:
    """Raise InvalidField if a step sets another network than the first step, because all steps share a sandbox."""
    steps = config.steps or []
    for number, step in enumerate(steps[1:], 1):
        for name, first, own in zip(
            ("agent", "verifier"), of_step(config, steps[0]), of_step(config, step), strict=True
        ):
            if (first.network_mode, first.allowed_hosts) != (own.network_mode, own.allowed_hosts):
                raise InvalidField(
                    "another network than that of the first step", field=f"steps.{number}.{name}.network_mode"
                )
