"""Control routes for delivery: consumers of the results, callbacks that were given up, and removal of old groups."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

from outrider.api.control_router import Caller, ControlRouter, Serving, body
from outrider.errors import Conflict, NotFound
from outrider.schemas import CallbackList, ConsumerList, ConsumerView, GcReport, Redelivered
from outrider.service.principals import Principal
from outrider.service.service import Service
from outrider.service.views import callback_view
from outrider.spec import CONSUMER_NAME, TENANT_NAME, AckSpec, GcSpec

Name = Annotated[str, Path(pattern=CONSUMER_NAME)]
Tenant = Annotated[
    str | None,
    Query(pattern=TENANT_NAME, description="whose consumer it is, for an admin; default: the admins' own"),
]
Limit = Annotated[int, Query(ge=1, le=1000)]
DEAD_LISTED = 100
"""Default length of a list of callbacks that were given up."""


ROUTES = ControlRouter()


@ROUTES.get("/consumers", "read", ConsumerList)
async def listed(service: Serving, caller: Caller) -> ConsumerList:
    """List the consumers with their positions."""
    return await _consumers(service, caller.sees)


@ROUTES.post("/consumers/{name}/ack", "submit", ConsumerView, errors=(Conflict,))
async def acknowledge(
    service: Serving,
    caller: Caller,
    name: Name,
    # an empty body is parsed as {}, so that the error names the missing field
    spec: Annotated[AckSpec, body(AckSpec, empty=b"{}")],
    tenant: Tenant = None,
) -> ConsumerView:
    """Acknowledge the groups up to a cursor: the consumer continues after it. The position moves back only with
    `rewind`."""
    owner = _owner(caller, name, tenant)
    return await service.store.consumers.acknowledge(name, spec.cursor, rewind=spec.rewind, tenant=owner)


@ROUTES.delete("/consumers/{name}", "submit", ConsumerList)
async def remove(service: Serving, caller: Caller, name: Name, tenant: Tenant = None) -> ConsumerList:
    """Delete a consumer. Groups that it has not acknowledged are no longer kept for it."""
    await service.store.consumers.remove(name, tenant=_owner(caller, name, tenant))
    return await _consumers(service, caller.sees)


@ROUTES.get("/callbacks/dead", "read", CallbackList)
async def dead(service: Serving, caller: Caller, limit: Limit = DEAD_LISTED) -> CallbackList:
    """List callbacks that were given up, newest first."""
    return await _dead(service, limit, caller.sees)


@ROUTES.post("/callbacks/dead/redeliver", "admin", Redelivered)
async def redeliver_all(service: Serving) -> Redelivered:
    """Retry all callbacks that were given up."""
    return Redelivered(callbacks=await service.redeliver())


@ROUTES.post("/callbacks/dead/{group_id}/redeliver", "admin", Redelivered)
async def redeliver(service: Serving, group_id: str) -> Redelivered:
    """Retry a group's callback that was given up."""
    return Redelivered(callbacks=await service.redeliver(group_id))


@ROUTES.delete("/callbacks/dead/{group_id}", "admin", CallbackList)
async def discard(service: Serving, group_id: str) -> CallbackList:
    """Discard the callback of a group. The callback is never sent, and does not prevent the removal of the group any
    more. The reply lists the newest 100 of the remaining given-up callbacks."""
    await service.store.discard_delivery(group_id)
    return await _dead(service, DEAD_LISTED, None)


@ROUTES.post("/gc", "admin", GcReport)
async def collect(service: Serving, spec: Annotated[GcSpec, body(GcSpec)]) -> GcReport:
    """Remove finished groups that are too old or too many. This takes up to about 20 seconds. A dry run only counts the
    groups."""
    return await service.retention.collect(spec)


def _owner(caller: Principal, name: str, tenant: str | None) -> str | None:
    """Return the tenant that owns the consumer, or None if it belongs to the admins. Raises NotFound if the caller
    names a tenant other than its own."""
    if caller.sees is not None and tenant not in (None, caller.tenant):
        raise NotFound(f"no consumer {name!r} of tenant {tenant!r}", hint="leave `tenant` out for your own")
    return caller.sees or tenant


async def _consumers(service: Service, tenant: str | None) -> ConsumerList:
    return ConsumerList(consumers=tuple(await service.store.consumers.listed(tenant)))


async def _dead(service: Service, limit: int, tenant: str | None) -> CallbackList:
    found = await service.store.dead_deliveries(limit=limit, tenant=tenant)
    return CallbackList(callbacks=tuple(map(callback_view, found)))
