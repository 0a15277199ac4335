"""Control routes for engines."""

from __future__ import annotations

from typing import Annotated

from outrider.api.control_router import ControlRouter, Created, Serving, body
from outrider.errors import Conflict, EngineMisbehaved, EngineUnavailable
from outrider.schemas import EngineList, EngineStatus
from outrider.spec import EngineSpec

ROUTES = ControlRouter()


@ROUTES.get("/engines", "read", EngineList)
async def engines(service: Serving) -> EngineList:
    """List the engines of the policy and of frozen models, with their load."""
    return EngineList(engines=service.engines())


@ROUTES.post("/engines", "admin", EngineStatus, status=201, errors=(Conflict, EngineMisbehaved, EngineUnavailable))
async def add(service: Serving, spec: Annotated[EngineSpec, body(EngineSpec)], created: Created) -> EngineStatus:
    """Attach an engine while sessions run. The engine must reply, and its tokenizer must be that of the model."""
    engine = await service.attach_engine(spec)
    created(name=engine.name)
    return engine


@ROUTES.post("/engines/{name}/drain", "admin", EngineList)
async def drain(service: Serving, name: str) -> EngineList:
    """Stop giving an engine new sessions. Sessions that already use the engine keep it until they end."""
    service.pool_of(name).drain(name)
    return EngineList(engines=service.engines())


@ROUTES.delete("/engines/{name}", "admin", EngineList)
async def remove(service: Serving, name: str) -> EngineList:
    """Detach an engine. Running generations get 30 seconds to end. The engine's sessions move to another engine."""
    await service.pool_of(name).remove(name)
    return EngineList(engines=service.engines())
