"""The control route for the status of the service."""

from __future__ import annotations

from outrider.api.control_router import Caller, ControlRouter, Serving
from outrider.schemas import ServiceStatus

ROUTES = ControlRouter()


@ROUTES.get("/status", "read", ServiceStatus)
async def status(service: Serving, caller: Caller) -> ServiceStatus:
    """Report sessions by state, nodes with their lanes, and engines with their load."""
    return await service.status(caller)
