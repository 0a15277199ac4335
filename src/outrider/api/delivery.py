"""Control routes for delivery: consumers of the results, abandoned callbacks, and removal of old groups."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from outrider.api.access import caller_in, sees
from outrider.api.control_bodies import whole_body
from outrider.api.control_replies import json_reply
from outrider.api.openapi import answers, takes
from outrider.errors import Conflict, NotFound
from outrider.schemas import CallbackList, ConsumerList, ConsumerView, GcReport, Redelivered
from outrider.service.admission import parse_body
from outrider.service.service import Service
from outrider.service.views import callback_view, consumer_view
from outrider.spec import CONSUMER_NAME, TENANT_NAME, AckSpec, GcSpec

Name = Annotated[str, Path(pattern=CONSUMER_NAME)]
Tenant = Annotated[
    str | None,
    Query(pattern=TENANT_NAME, description="whose consumer it is, for an admin; default: the admins' own"),
]
Limit = Annotated[int, Query(ge=1, le=1000)]
DEAD_LISTED = 100
"""Number of given-up callbacks in a list, unless `limit` requests another number."""


def delivery_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/consumers", **answers(ConsumerList))
    async def listed(request: Request) -> Response:
        """List the consumers with their positions."""
        return json_reply(await _consumers(service, sees(request)))

    @routes.post("/consumers/{name}/ack", **takes(AckSpec), **answers(ConsumerView, Conflict))
    async def acknowledge(name: Name, request: Request, tenant: Tenant = None) -> Response:
        """Acknowledge groups: the consumer reads on after them. The position moves back only with `rewind`."""
        body = await whole_body(request) or b"{}"  # without a body, the refusal names the missing field
        spec = await service.parse(AckSpec, body, caller_in(request.scope))
        owner = _owner(request, name, tenant)
        moved = await service.store.consumers.acknowledge(name, spec.cursor, rewind=spec.rewind, tenant=owner)
        return json_reply(consumer_view(moved))

    @routes.delete("/consumers/{name}", **answers(ConsumerList))
    async def remove(name: Name, request: Request, tenant: Tenant = None) -> Response:
        """Delete a consumer. Groups are no longer kept until the consumer has acknowledged them."""
        await service.store.consumers.remove(name, tenant=_owner(request, name, tenant))
        return json_reply(await _consumers(service, sees(request)))

    @routes.get("/callbacks/dead", **answers(CallbackList))
    async def dead(request: Request, limit: Limit = DEAD_LISTED) -> Response:
        """List callbacks that were given up, newest first."""
        return json_reply(await _dead(service, limit, sees(request)))

    @routes.post("/callbacks/dead/redeliver", **answers(Redelivered))
    async def redeliver_all() -> Response:
        """Retry all callbacks that were given up."""
        return json_reply(Redelivered(callbacks=await service.redeliver()))

    @routes.post("/callbacks/dead/{group_id}/redeliver", **answers(Redelivered))
    async def redeliver(group_id: str) -> Response:
        """Retry the given-up callback of a group."""
        return json_reply(Redelivered(callbacks=await service.redeliver(group_id)))

    @routes.delete("/callbacks/dead/{group_id}", **answers(CallbackList))
    async def discard(group_id: str) -> Response:
        """Discard the callback of a group: it is never delivered, and no longer keeps the group from being removed. The
        reply lists the newest 100 of the others that were given up."""
        await service.store.discard_delivery(group_id)
        return json_reply(await _dead(service, DEAD_LISTED, None))

    @routes.post("/gc", **takes(GcSpec), **answers(GcReport))
    async def collect(request: Request) -> Response:
        """Remove finished groups that are old or too many, for up to about 20 seconds; or only count them."""
        return json_reply(await service.retention.collect(parse_body(GcSpec, await whole_body(request))))

    return routes


def _owner(request: Request, name: str, tenant: str | None) -> str | None:
    """Return the tenant that owns the consumer, or None for admins. Raises NotFound for a consumer of another
    tenant."""
    caller = caller_in(request.scope)
    if caller.sees is not None and tenant not in (None, caller.tenant):
        raise NotFound(f"no consumer {name!r} of tenant {tenant!r}", hint="leave `tenant` out for your own")
    return caller.sees or tenant


async def _consumers(service: Service, tenant: str | None) -> ConsumerList:
    return ConsumerList(consumers=tuple(map(consumer_view, await service.store.consumers.listed(tenant))))


async def _dead(service: Service, limit: int, tenant: str | None) -> CallbackList:
    found = await service.store.dead_deliveries(limit=limit, tenant=tenant)
    return CallbackList(callbacks=tuple(map(callback_view, found)))
