"""The control route that diagnoses a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from outrider.api.control_router import Caller, ControlRouter, Serving
from outrider.errors import InvalidField, NotFound
from outrider.schemas import RunDiagnosis

MOST_NAMED_GROUPS = 200
"""A request may name at most this many groups, because each of them needs its own query."""

ROUTES = ControlRouter()


@ROUTES.get("/diagnosis", "read", RunDiagnosis, errors=(NotFound,))
async def diagnosis(
    service: Serving,
    caller: Caller,
    label: Annotated[list[str] | None, Query(description="NAME=VALUE; may be repeated: all must be equal")] = None,
    group: Annotated[list[str] | None, Query(description="the id of a group; may be repeated")] = None,
    since: Annotated[float, Query(ge=0, description="seconds since the epoch")] = 0.0,
) -> RunDiagnosis:
    """List the faults of a run, with evidence. The run consists of the groups with these labels, of the named groups,
    or of all groups."""
    pairs = [each.partition("=") for each in label or ()]
    if any(not name or not equals for name, equals, _ in pairs):
        raise InvalidField("a label is NAME=VALUE", field="label")
    if group is not None and len(group) > MOST_NAMED_GROUPS:
        raise InvalidField(
            f"{len(group)} groups are named, and at most {MOST_NAMED_GROUPS} can be",
            field="group",
            hint="give the groups a common label, and name the label",
        )
    return await service.doctor.diagnose(
        labels={name: value for name, _, value in pairs}, groups=group or (), since=since, tenant=caller.sees
    )
