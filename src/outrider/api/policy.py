"""Control routes for the policy that the engines serve: its version, its pause, and new weights."""

from __future__ import annotations

from typing import Annotated

from outrider.api.control_router import ControlRouter, Serving, body
from outrider.errors import Conflict, EngineMisbehaved, EngineUnavailable
from outrider.schemas import PolicyStatus
from outrider.spec import PolicyPauseSpec, PolicyResumeSpec, PolicyUpdateSpec

FAILURES = (Conflict, EngineMisbehaved, EngineUnavailable)
"""Errors of routes that change the policy. The engines make the change, and may fail."""

ROUTES = ControlRouter("/policy")


@ROUTES.get("", "read", PolicyStatus)
async def status(service: Serving) -> PolicyStatus:
    """Get the policy's version, whether it is paused, and the version of each engine."""
    return service.pool.policy.status()


@ROUTES.post("", "admin", PolicyStatus, errors=FAILURES)
async def update(service: Serving, spec: Annotated[PolicyUpdateSpec, body(PolicyUpdateSpec)]) -> PolicyStatus:
    """Raise the version: pause, have the engines load the weights if given, and resume. The reply is sent when the
    engines generate again."""
    return await service.update_policy(spec)


@ROUTES.post("/pause", "admin", PolicyStatus, errors=FAILURES)
async def pause(service: Serving, spec: Annotated[PolicyPauseSpec, body(PolicyPauseSpec)]) -> PolicyStatus:
    """Start no new generations until the policy is resumed. The reply is sent when no generation is under way. The time
    limits of agents do not run during the pause."""
    await service.pool.policy.pause(spec.mode)
    return service.pool.policy.status()


@ROUTES.post("/resume", "admin", PolicyStatus, errors=FAILURES)
async def resume(service: Serving, spec: Annotated[PolicyResumeSpec, body(PolicyResumeSpec)]) -> PolicyStatus:
    """Send the engines the version of their weights, if given, and generate again."""
    await service.pool.policy.resume(spec.version, go_back=spec.go_back)
    return service.pool.policy.status()
