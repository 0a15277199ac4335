"""Query parameters that filter the lists of sessions and of groups."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query

from outrider.errors import InvalidField
from outrider.store.run_index.lists import SessionFilter

MAX_TEXT = 1000


async def session_filter(
    state: Annotated[list[str] | None, Query(max_length=8, description="may be repeated: any of them")] = None,
    label: Annotated[
        list[str] | None, Query(max_length=64, description="NAME=VALUE; may be repeated: all must be equal")
    ] = None,
    group: Annotated[list[str] | None, Query(max_length=100, description="id of a group; may be repeated")] = None,
    harness: Annotated[str | None, Query(description="name of a preset or agent, `command` or `external`")] = None,
    min_reward: Annotated[float | None, Query(allow_inf_nan=False, description="at least this reward")] = None,
    max_reward: Annotated[float | None, Query(allow_inf_nan=False, description="at most this reward")] = None,
    stop_reason: Annotated[str | None, Query(description="such as completed, agent_timeout or error")] = None,
    error: Annotated[str | None, Query(description="code of the session's error")] = None,
    since: Annotated[
        float, Query(ge=0, allow_inf_nan=False, description="submitted at or after: seconds since the epoch")
    ] = 0.0,
    until: Annotated[float | None, Query(ge=0, allow_inf_nan=False, description="submitted before")] = None,
    text: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=MAX_TEXT,
            description="in the error, the end of the agent's output or the answer; the case does not matter",
        ),
    ] = None,
) -> SessionFilter:
    """Return the filter that a request's parameters describe. Raises InvalidField if a label does not have the form
    NAME=VALUE."""
    pairs = [each.partition("=") for each in label or ()]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise InvalidField("a label is NAME=VALUE", field="label")
    return SessionFilter(
        states=tuple(state or ()),
        labels={name: value for name, _, value in pairs},
        groups=tuple(group or ()),
        harness=harness,
        min_reward=min_reward,
        max_reward=max_reward,
        stop_reason=stop_reason,
        error=error,
        since=since or None,
        until=until,
        text=text,
    )


Wanted = Annotated[SessionFilter, Depends(session_filter)]
"""Annotation for the parameter of a handler that gets the request's filter."""
