"""Control routes for the policy that the engines serve: its version, its pause, and new weights."""

from __future__ import annotations

from typing import Annotated

from outrider.api.control_router import ControlRouter, Serving, body
from outrider.errors import Conflict, EngineMisbehaved, EngineUnavailable
from outrider.schemas import PolicyStatus
from outrider.spec import PolicyPauseSpec, PolicyResumeSpec, PolicyUpdateSpec

FAILURES = (Conflict, EngineMisbehaved, EngineUnavailable)
"""Errors of routes that change the policy. The engines carry out the change, and may fail."""

ROUTES = ControlRouter("/policy")


@ROUTES.get("", "read", PolicyStatus)
async def status(service: Serving) -> PolicyStatus:
    """Get the policy's version, whether it is paused, and the version of each engine."""
    return service.pool.policy.status()


@ROUTES.post("", "admin", PolicyStatus, errors=FAILURES)
async def update(service: Serving, spec: Annotated[PolicyUpdateSpec, body(PolicyUpdateSpec)]) -> PolicyStatus:
    """Raise the policy's version: pause, let the engines load weights if the request names any, and resume. The reply
    is sent when the engines generate again."""
    return await service.update_policy(spec)


@ROUTES.post("/pause", "admin", PolicyStatus, errors=FAILURES)
async def pause(service: Serving, spec: Annotated[PolicyPauseSpec, body(PolicyPauseSpec)]) -> PolicyStatus:
    """Start no new generations until the policy is resumed. The reply is sent when no generation is running any more.
    The pause does not count towards the time limits of agents."""
    await service.pool.policy.pause(spec.mode)
    return service.pool.policy.status()


@ROUTES.post("/resume", "admin", PolicyStatus, errors=FAILURES)
async def resume(service: Serving, spec: Annotated[PolicyResumeSpec, body(PolicyResumeSpec)]) -> PolicyStatus:
    """Let the engines generate again. If the request has a version, this version is first recorded as the version of
    the engines' weights."""
    await service.pool.policy.resume(spec.version, go_back=spec.go_back)
    return service.pool.policy.status()
