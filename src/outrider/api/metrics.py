"""Control routes for the whole service: metrics for Prometheus, and the rates of the last hour.

Invariant: these replies describe all tenants together, so only admins and tokens of the operator's tenant get them.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Header, Response

from outrider.api.control_replies import long_reply
from outrider.api.control_router import Caller, ControlRouter, Serving
from outrider.api.openapi import file_answer
from outrider.errors import Forbidden
from outrider.schemas import RateList
from outrider.service.metrics_text import metrics_text
from outrider.service.principals import Principal
from outrider.spec import OPERATOR_TENANT

TEXT = "text/plain; version=0.0.4; charset=utf-8"

ROUTES = ControlRouter("/rates")
METRICS = ControlRouter("/metrics", version="")


@METRICS.get("", "read", also=file_answer("The metrics, as text.", TEXT))
async def metrics(service: Serving, caller: Caller, accept: Annotated[str, Header()] = "") -> Response:
    """Read the metrics of the service and all its nodes, as Prometheus text, or as OpenMetrics if the `Accept` header
    prefers it. The metrics describe all tenants together, so the token must be an admin's or belong to the tenant
    `operator`."""
    _check_operator(caller, "/metrics")
    values = await service.metrics.read()
    text = await asyncio.to_thread(metrics_text, values, accept)
    return long_reply([text.body], text.content_type)


@ROUTES.get("", "read", RateList)
async def rates(service: Serving, caller: Caller) -> RateList:
    """List the numbers of sessions, model calls and tokens in each step of the last hour. The numbers describe all
    tenants together, so the token must be an admin's or belong to the tenant `operator`."""
    _check_operator(caller, "/v1/rates")
    return service.rates.view()


def _check_operator(caller: Principal, path: str) -> None:
    if caller.sees not in (None, OPERATOR_TENANT):
        raise Forbidden(
            f"{path} is about all tenants, and {caller.name!r} is a token of the tenant {caller.tenant!r}",
            hint=f"the operator makes one: outrider token create --role read --tenant {OPERATOR_TENANT}",
        )
