"""Control routes for the policy that the engines serve: its version, its pause, and new weights."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from outrider.api.control_bodies import whole_body
from outrider.api.control_replies import json_reply
from outrider.api.openapi import answers, takes
from outrider.errors import Conflict, EngineMisbehaved, EngineUnavailable
from outrider.schemas import PolicyStatus
from outrider.service.admission import parse_body
from outrider.service.service import Service
from outrider.spec import PolicyPauseSpec, PolicyResumeSpec, PolicyUpdateSpec

FAILURES = (Conflict, EngineMisbehaved, EngineUnavailable)
"""Errors with which a change of the policy may end, because the engines must carry it out."""


def policy_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/policy")

    @routes.get("", **answers(PolicyStatus))
    async def status() -> Response:
        """Get the policy's version, whether it is paused, and the version of each engine."""
        return json_reply(service.pool.policy.status())

    @routes.post("", **takes(PolicyUpdateSpec), **answers(PolicyStatus, *FAILURES))
    async def update(request: Request) -> Response:
        """Raise the version: pause, have the engines load the weights if given, and resume. Replies when the engines
        generate again."""
        return json_reply(await service.update_policy(parse_body(PolicyUpdateSpec, await whole_body(request))))

    @routes.post("/pause", **takes(PolicyPauseSpec), **answers(PolicyStatus, *FAILURES))
    async def pause(request: Request) -> Response:
        """Hold back new generations. Replies when no generation is under way. The clocks of agents stand still
        meanwhile."""
        await service.pool.policy.pause(parse_body(PolicyPauseSpec, await whole_body(request)).mode)
        return json_reply(service.pool.policy.status())

    @routes.post("/resume", **takes(PolicyResumeSpec), **answers(PolicyStatus, *FAILURES))
    async def resume(request: Request) -> Response:
        """Send the engines the version of their weights, if given, and generate again."""
        asked = parse_body(PolicyResumeSpec, await whole_body(request))
        await service.pool.policy.resume(asked.version, go_back=asked.go_back)
        return json_reply(service.pool.policy.status())

    return routes
