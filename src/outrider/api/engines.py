"""Control routes for engines and for the status of the service."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from outrider.api.access import caller_in, made
from outrider.api.control_bodies import whole_body
from outrider.api.control_replies import json_reply
from outrider.api.openapi import answers, takes
from outrider.errors import Conflict, EngineMisbehaved, EngineUnavailable
from outrider.schemas import EngineList, EngineStatus, ServiceStatus
from outrider.service.admission import parse_body
from outrider.service.service import Service
from outrider.spec import EngineSpec


def engine_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/engines", **answers(EngineList))
    async def engines() -> Response:
        """List the engines of the policy and of frozen models, with their load."""
        return json_reply(EngineList(engines=service.engines()))

    @routes.post(
        "/engines",
        status_code=201,
        **takes(EngineSpec),
        **answers(EngineStatus, Conflict, EngineMisbehaved, EngineUnavailable, status=201),
    )
    async def add(request: Request) -> Response:
        """Attach an engine while sessions run. The engine must respond, and must have the tokenizer of the model
        that it serves."""
        engine = await service.attach_engine(parse_body(EngineSpec, await whole_body(request)))
        made(request, name=engine.name)
        return json_reply(engine, status=201)

    @routes.post("/engines/{name}/drain", **answers(EngineList))
    async def drain(name: str) -> Response:
        """Stop giving an engine new sessions. The sessions already on it stay there until they end."""
        service.pool_of(name).drain(name)
        return json_reply(EngineList(engines=service.engines()))

    @routes.delete("/engines/{name}", **answers(EngineList))
    async def remove(name: str) -> Response:
        """Detach an engine. Generations under way have 30 seconds to end; sessions move to another engine."""
        await service.pool_of(name).remove(name)
        return json_reply(EngineList(engines=service.engines()))

    @routes.get("/status", **answers(ServiceStatus))
    async def status(request: Request) -> Response:
        """Report sessions by state, nodes with their lanes, and engines with their load."""
        return json_reply(await service.status(caller_in(request.scope)))

    return routes
