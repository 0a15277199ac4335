"""Stores how long the phases of a trainer's steps took (`/training/timing`). verl's recipe sends one record per step.

A record is a JSON object of the client, and is returned unchanged. Only its fields `epoch` and `global_step` are read,
because they identify the record. Invariant: a record is stored before the reply is sent.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from outrider.api.compat.routes import CompatRoute
from outrider.api.control_bodies import whole_body
from outrider.api.control_replies import long_reply
from outrider.errors import InvalidField, NotFound
from outrider.service.principals import Principal

if TYPE_CHECKING:
    from outrider.service.service import Service

MOST_BYTES = 8 << 10
"""Maximum size of a record in bytes. A record of twelve phases with two times each has about a tenth of this."""
HIGHEST = 10**18
_NUMBER = re.compile(r"-?[0-9]{1,18}")


def timing_routes(service: Service) -> list[CompatRoute]:
    timings = _Timings(service)
    return [
        CompatRoute("POST", "/training/timing", "submit", timings.keep),
        CompatRoute("GET", "/training/timing", "read", timings.all),
        CompatRoute("GET", "/training/timing/{epoch}/{global_step}", "read", timings.one),
    ]


class _Timings:
    """Handlers of the routes. A caller sees only records of its own tenant."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def keep(self, request: Request, caller: Principal) -> Any:
        """Store the record of a step, in place of an earlier record of the same step."""
        body = await whole_body(request)
        record = _record(body)
        epoch, step = _whole(record, "epoch"), _whole(record, "global_step")
        await self._service.store.training_timings.keep(caller.tenant, epoch, step, body)
        return {"status": "recorded", "epoch": epoch, "global_step": step}

    async def all(self, request: Request, caller: Principal) -> Response:
        records = await self._service.store.training_timings.all(caller.tenant)

        def made() -> bytes:
            return msgspec.json.encode({"count": len(records), "timings": [msgspec.Raw(each) for each in records]})

        return long_reply([await self._service.reader.offload(made)])

    async def one(self, request: Request, caller: Principal) -> Response:
        epoch, step = (_of_path(request, name) for name in ("epoch", "global_step"))
        record = await self._service.store.training_timings.find(caller.tenant, epoch, step)
        if record is None:
            raise NotFound(f"there is no record of epoch {epoch}, step {step}", hint="POST /training/timing stores one")
        return Response(record, media_type="application/json")


def _record(body: bytes) -> dict[str, Any]:
    """Parse the body as a record. Raises InvalidField."""
    if len(body) > MOST_BYTES:
        raise InvalidField(
            f"the body has {len(body)} bytes, and a record may have {MOST_BYTES}",
            field="body",
            hint="send the times of the phases only",
        )
    try:
        record = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidField(f"the body is not JSON: {error}", field="body") from error
    if not isinstance(record, dict):
        raise InvalidField("the body is no JSON object", field="body", hint='send {"epoch": 0, "global_step": 1, ...}')
    return record


def _whole(record: dict[str, Any], name: str) -> int:
    """Return a field of the record that must be a whole number. Raises InvalidField."""
    value = record.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= HIGHEST:
        shown = "is missing" if name not in record else "is no whole number of up to 18 digits"
        raise InvalidField(shown, field=name, hint=f'send a number, such as "{name}": 1')
    return value


def _of_path(request: Request, name: str) -> int:
    text: str = request.path_params[name]
    if not _NUMBER.fullmatch(text):
        raise InvalidField("is no whole number of up to 18 digits", field=name)
    return int(text)
