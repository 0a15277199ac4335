"""The tools of the MCP server. Each tool has arguments, a role that the caller needs, and a function that calls the
service.

The tools use only the client of the control API. So the service checks the token, the role and the tenant of their
calls, as for any other call. The module does not depend on the package `mcp`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError

from outrider.client.client import AsyncClient
from outrider.faults import first_fault
from outrider.mcp.text import MAX_ITEMS, clipped, json_text, session_text, timeline_text
from outrider.spec import Name, PauseSpec, QuerySpec, Role, SessionsSpec, Spec

Labels = Annotated[dict[Name, str], Field(max_length=64, description="labels of the group: all must match")]
Limit = Annotated[int, Field(ge=1, le=MAX_ITEMS, description="most items in the result")]
Time = Annotated[float, Field(ge=0, description="seconds since the epoch")]


class NoArguments(Spec):
    """No arguments."""


class ListArguments(Spec):
    """A filter: every given field must match. `after` is the `after` of the previous page."""

    state: Annotated[
        list[Name],
        Field(max_length=8, description="queued, initializing, ready, running, evaluating, done; groups: active, done"),
    ] = Field(default_factory=list)
    labels: Labels = Field(default_factory=dict)
    groups: Annotated[list[Name], Field(max_length=100, description="ids of groups")] = Field(default_factory=list)
    harness: Name | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    stop_reason: Annotated[Name | None, Field(description="such as completed, error, agent_timeout, max_turns")] = None
    error: Annotated[Name | None, Field(description="code of the error")] = None
    since: Time | None = None
    until: Time | None = None
    text: Annotated[
        str | None, Field(min_length=1, max_length=1000, description="in the error, the output or the answer")
    ] = None
    after: Name | None = None
    limit: Limit = 20


class ShowArguments(Spec):
    """A session, and the requested part of its turns."""

    session: Annotated[Name, Field(description="id of the session, s-...")]
    first_turn: Annotated[int, Field(ge=0)] = 0
    characters: Annotated[int, Field(ge=100, le=10_000, description="most characters of each text")] = 1500


class TimelineArguments(Spec):
    """A session, and the requested spans."""

    session: Annotated[Name, Field(description="id of the session, s-...")]
    attempt: Annotated[int, Field(ge=1)] | None = None
    kinds: Annotated[
        list[Name], Field(max_length=8, description="stage, sandbox, call, command, process, error; none: all")
    ] = Field(default_factory=list)
    first: Annotated[int, Field(ge=0, description="number of the first span")] = 0


class DiffArguments(Spec):
    """Two runs, each named by labels (run=a, or run=a,set=test) or by ids of groups, with commas between several."""

    a: Name
    b: Name
    passed: Annotated[float, Field(description="least reward of a solved session")] = 1.0


class DiagnoseArguments(Spec):
    """The groups to read: by labels or by ids, or all since a time."""

    labels: Labels = Field(default_factory=dict)
    groups: Annotated[list[Name], Field(max_length=200, description="ids of groups")] = Field(default_factory=list)
    since: Time = 0.0


class MetricsArguments(Spec):
    """The metrics that are wanted."""

    prefix: Annotated[str, Field(max_length=200, description="beginning of the names, such as outrider_sessions")] = ""


class NodeArguments(Spec):
    """A node."""

    node: Annotated[Name, Field(description="name of the node, as in the tool status")]


class CancelArguments(SessionsSpec):
    """The sessions to cancel. Call with dry_run first."""


class RetryArguments(SessionsSpec):
    """The sessions to submit again. Call with dry_run first."""


async def _status(client: AsyncClient, _: NoArguments) -> str:
    return json_text(await client.status())


async def _groups(client: AsyncClient, wanted: ListArguments) -> str:
    return json_text(await client.group_page(_filter(wanted), after=wanted.after, limit=wanted.limit))


async def _sessions(client: AsyncClient, wanted: ListArguments) -> str:
    page = await client.sessions(**_filter(wanted), after=wanted.after, limit=wanted.limit)
    rows = []
    for session in page.sessions:
        row: dict[str, Any] = {"id": session.id, "group_id": session.group_id, "state": session.state}
        row |= {"attempt": session.attempt, "created": session.created, "node": session.node}
        if (result := session.result) is not None:
            reward = None if result.verdict is None else result.verdict.reward
            row |= {"stop_reason": result.stop_reason, "reward": reward, "turns": result.turns}
            row |= {"tokens_sampled": result.tokens.sampled, "labels": result.labels}
        error = session.last_error if result is None else result.error
        if error is not None:
            row["error"] = {"code": error.code, "message": clipped(error.message, 300)}
        rows.append(row)
    return json_text({"sessions": rows, "after": page.after})


async def _show(client: AsyncClient, wanted: ShowArguments) -> str:
    session, turns = await client.session(wanted.session), await client.turns(wanted.session)
    return session_text(session, turns, first=wanted.first_turn, limit=wanted.characters)


async def _timeline(client: AsyncClient, wanted: TimelineArguments) -> str:
    timeline = await client.timeline(wanted.session, wanted.attempt)
    return timeline_text(timeline, frozenset(wanted.kinds), first=wanted.first)


async def _query(client: AsyncClient, wanted: QuerySpec) -> str:
    return json_text(await client.query(wanted.sql))


async def _diff(client: AsyncClient, wanted: DiffArguments) -> str:
    return json_text(await client.diff(wanted.a, wanted.b, passed=wanted.passed))


async def _diagnose(client: AsyncClient, wanted: DiagnoseArguments) -> str:
    return json_text(await client.diagnosis(labels=wanted.labels, groups=wanted.groups, since=wanted.since))


async def _metrics(client: AsyncClient, wanted: MetricsArguments) -> str:
    lines = (await client.metrics()).splitlines()
    return "\n".join(line for line in lines if line.removeprefix("# HELP ").startswith(wanted.prefix))


async def _pauses(client: AsyncClient, _: NoArguments) -> str:
    return json_text(await client.pauses())


async def _cancel(client: AsyncClient, wanted: CancelArguments) -> str:
    return json_text(await client.cancel_sessions(wanted))


async def _retry(client: AsyncClient, wanted: RetryArguments) -> str:
    return json_text(await client.retry_sessions(wanted))


async def _pause(client: AsyncClient, wanted: PauseSpec) -> str:
    return json_text(
        await client.pause_queue(labels=wanted.labels, harness=wanted.harness, tenant=wanted.tenant),
    )


async def _resume(client: AsyncClient, wanted: PauseSpec) -> str:
    return json_text(
        await client.resume_queue(labels=wanted.labels, harness=wanted.harness, tenant=wanted.tenant),
    )


async def _drain(client: AsyncClient, wanted: NodeArguments) -> str:
    return json_text(await client.drain_node(wanted.node))


async def _undrain(client: AsyncClient, wanted: NodeArguments) -> str:
    return json_text(await client.resume_node(wanted.node))


class McpTool(NamedTuple):
    """A tool. `role` is the role that the service requires for the tool's calls. `more` tells the reader how to get the
    rest of a result that was too long. `destroys` is True if the tool's effect cannot be undone."""

    name: str
    role: Role
    about: str
    arguments: type[Spec]
    call: Callable[[AsyncClient, Any], Awaitable[str]]
    more: str = "ask for less"
    destroys: bool = False

    def read(self, given: Mapping[str, Any]) -> Spec:
        """Parse the arguments of a call of this tool. Raises InvalidField if they are not valid."""
        try:
            return self.arguments.model_validate(dict(given))
        except ValidationError as error:
            known = ", ".join(self.arguments.model_fields) or "none"
            raise first_fault(error, self.arguments, hint=f"arguments of {self.name}: {known}") from error


_PAGE = "use a smaller limit, and page with `after`"
TOOLS = (
    McpTool(
        "status",
        "read",
        "State of the service: sessions by state, nodes with lanes, engines, policy, failing background work.",
        NoArguments,
        _status,
    ),
    McpTool(
        "diagnose",
        "read",
        "List the faults of a run, each with numbers, sessions that show the fault, and the next step. Call this tool"
        " first to find out why a run went wrong.",
        DiagnoseArguments,
        _diagnose,
        "name fewer groups",
    ),
    McpTool("list_groups", "read", "List groups that match a filter, newest first.", ListArguments, _groups, _PAGE),
    McpTool(
        "list_sessions",
        "read",
        "List sessions that match a filter, newest group first.",
        ListArguments,
        _sessions,
        _PAGE,
    ),
    McpTool(
        "show_session",
        "read",
        "Show a session: result, reward, error with hint, and its turns as text (the context, and what the model"
        " sampled).",
        ShowArguments,
        _show,
        "use fewer characters, or a later first_turn",
    ),
    McpTool(
        "timeline",
        "read",
        "List what happened when in a session: stages, sandbox starts, model calls, commands, processes, errors.",
        TimelineArguments,
        _timeline,
        "name kinds",
    ),
    McpTool(
        "query",
        "read",
        "Run one SELECT (SQLite) over the views groups, sessions, turns, errors, rewards, tokens. The resource"
        " outrider://views describes their columns.",
        QuerySpec,
        _query,
        "add LIMIT, or aggregate",
    ),
    McpTool("diff", "read", "Compare two runs: rewards, pass@k, failures, flipped sessions.", DiffArguments, _diff),
    McpTool(
        "metrics",
        "read",
        "Read the service's Prometheus metrics. Only for tokens of the operator.",
        MetricsArguments,
        _metrics,
        "give a longer prefix",
    ),
    McpTool("list_pauses", "read", "List the pauses of the queue, and count the held sessions.", NoArguments, _pauses),
    McpTool(
        "cancel_sessions",
        "submit",
        "Cancel all sessions that match a filter and are not done. Cannot be undone; call with dry_run first.",
        CancelArguments,
        _cancel,
        destroys=True,
    ),
    McpTool(
        "retry_sessions",
        "submit",
        "Submit all sessions that match a filter and are done again, in new groups. Call with dry_run first.",
        RetryArguments,
        _retry,
    ),
    McpTool("pause_queue", "submit", "Start no more sessions of some groups, until resume_queue.", PauseSpec, _pause),
    McpTool("resume_queue", "submit", "End the pause with the same arguments.", PauseSpec, _resume),
    McpTool(
        "drain_node",
        "admin",
        "Place no new sessions on a node, until resume_node. Sessions under way go on.",
        NodeArguments,
        _drain,
    ),
    McpTool("resume_node", "admin", "Place sessions on a drained node again.", NodeArguments, _undrain),
)


def _filter(wanted: ListArguments) -> dict[str, Any]:
    return wanted.model_dump(exclude={"after", "limit"}, exclude_defaults=True)
