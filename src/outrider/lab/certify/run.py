"""Runs a certification: starts a whole service with the scripted model in this process, and runs one session for each
row (test) of the certificate. Before the row `sub-agent`, trial sessions look for the tool that starts a sub-agent.

Invariant: when `certify` returns, the service has ended and its data have been removed.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.api.server import serving
from outrider.client.client import AsyncClient
from outrider.config import Config, LanesConfig, ModelConfig, PluginsConfig
from outrider.errors import InvalidField
from outrider.harnesses.factory import make_harness
from outrider.lab.certify import note_server
from outrider.lab.certify.gateway_tap import tapped
from outrider.lab.certify.judge import Certificate, RowEvidence, RowVerdict, Subject, holds, judge
from outrider.lab.certify.rows import FIRST_WORD, MARK, NOTE_FILE, SERVER, SKILLS, TRIAL, CertificationRow
from outrider.lab.certify.scripted_model import ScriptedModel
from outrider.lab.certify.subagent_trial import SECONDS, SESSIONS
from outrider.lab.certify.users_paths import allowing
from outrider.lab.demo.dialogue import POLICY
from outrider.service.assembly import open_service
from outrider.spec import EvaluatorSpec, GroupSpec, HarnessSpec, Limits, McpServer, TaskSpec, Write
from outrider.tokens.rendering.tokenizer import Tokenizer

RENDERER = "qwen3"
MODEL = "outrider-check"
NOTE_SERVER = Path(note_server.__file__)
AT_ONCE = 2
"""Number of sessions that run at the same time."""

TURNS = 24
"""Maximum model calls of a session. Each row of the certificate needs fewer calls. Only a program that never stops
reaches the limit."""


async def certify(
    subject: Subject,
    rows: Sequence[CertificationRow],
    *,
    agent_seconds: float,
    watch: Callable[[RowVerdict], None] = lambda _: None,
) -> Certificate:
    """Run and judge every row. Calls `watch` with each verdict as soon as the row's session has ended. The verdicts of
    rows that are not tried follow at the end.

    Raises the service's error if the service refuses a session, for example because the harness is not installed or the
    runtime does not work on this machine.
    """
    started = time.monotonic()
    untried = {row.name: verdict for row in rows if (verdict := _untried(row, subject)) is not None}
    tried = [row for row in rows if row.name not in untried]
    verdicts = untried | (await _tried(tried, subject, agent_seconds, watch) if tried else {})
    for verdict in untried.values():
        watch(verdict)
    judged = tuple(verdicts[row.name] for row in rows)
    return Certificate(
        harness=subject.name,
        dialect=subject.dialect,
        runtime=subject.runtime.sandbox_kind,
        ok=holds(judged),
        rows=judged,
        seconds=round(time.monotonic() - started, 2),
    )


async def _tried(
    rows: Sequence[CertificationRow], subject: Subject, agent_seconds: float, watch: Callable[[RowVerdict], None]
) -> dict[str, RowVerdict]:
    """Run the rows in a service. Return their verdicts by name."""
    tasks = {row.name: _task(row, subject, agent_seconds) for row in rows}
    tasks[TRIAL.name] = _task(TRIAL, subject, min(agent_seconds, SECONDS))
    after_trial = [row for row in rows if row.needs == "subagent"]
    with tempfile.TemporaryDirectory(prefix="outrider-check-") as data:
        config = Config(
            port=0,
            data=Path(data),
            model=ModelConfig(tokenizer=str(POLICY), renderer=RENDERER, name=MODEL),
            lanes=LanesConfig(init=AT_ONCE, run=AT_ONCE, eval=AT_ONCE),
            # The user starts this service only for these tasks, so the tasks may run any Python and read the files that
            # they name.
            plugins=PluginsConfig(allow=("*",)),
        )
        config = await asyncio.to_thread(allowing, config, [group.task for group in tasks.values()])
        async with (
            open_service(config) as opened,
            serving(*opened) as url,
            tapped(opened.own_node, (FIRST_WORD,)) as tap,
            AsyncClient(url) as client,
        ):
            tokenizer = await asyncio.to_thread(Tokenizer.load, POLICY)
            model = ScriptedModel(tokenizer, str(POLICY), subject.hint, subject.runtime.workdir, tap.wait_until_sent)
            await opened.service.pool.add_engine(model)
            at_start = [*([TRIAL] if after_trial else []), *(row for row in rows if row not in after_trial)]
            submitted = {(await client.submit(tasks[row.name])).id: row for row in at_start}
            trials = 0
            verdicts: dict[str, RowVerdict] = {}
            async for group in client.follow(samples=True):
                row = submitted[group.id]
                if row is TRIAL:
                    trials += 1
                    again = model.trial.unfinished and trials < SESSIONS
                    for later in [TRIAL] if again else after_trial:
                        submitted[(await client.submit(tasks[later.name])).id] = later
                    continue
                [session] = group.sessions  # each row is submitted as a group of one session
                assert session.result is not None
                key = f"{session.id}-{session.result.attempt}"
                evidence = RowEvidence(
                    result=session.result,
                    samples=group.samples or (),
                    turns=await client.turns(session.id),
                    calls=[call for call in model.calls if call.session_key == key],
                    streams=tap.streams,
                    in_time=FIRST_WORD in tap.in_time,
                    tried=dict(model.trial.outcomes) if row in after_trial else {},
                )
                verdicts[row.name] = judge(row, evidence, hint=subject.hint, dialect=subject.dialect)
                watch(verdicts[row.name])
                if len(verdicts) == len(rows):
                    break
    return verdicts


def _given(row: CertificationRow, subject: Subject) -> HarnessSpec:
    """Return the harness, with the MCP server or the skill that the row needs."""
    harness = subject.harness
    if row.needs == "mcp":
        server = McpServer(
            name=SERVER,
            transport="stdio",
            command="python3",
            args=[NOTE_SERVER.name, NOTE_FILE],
        )
        return harness.model_copy(update={"mcp_servers": [*harness.mcp_servers, server]})
    if row.needs == "skill":
        return harness.model_copy(update={"skills": [*harness.skills, SKILLS]})
    return harness


def _untried(row: CertificationRow, subject: Subject) -> RowVerdict | None:
    """Return the verdict "not tried" if the harness does not support the MCP server or the skill that the row needs,
    and None otherwise."""
    if row.needs not in ("mcp", "skill"):
        return None
    try:
        make_harness(_given(row, subject))
    except InvalidField as error:
        return RowVerdict(row=row.name, what=row.what, verdict="not tried", required=False, reason=error.message)
    return None


def _task(row: CertificationRow, subject: Subject, agent_seconds: float) -> GroupSpec:
    # Treat an exit code other than 0 as an error. The row then fails, and its verdict has the program's log.
    strictly = {} if subject.harness.agent is not None else {"nonzero_exit": "error"}
    files = [
        Write(write=b64encode(data).decode(), to=name, encoding="base64")
        if isinstance(data, bytes)
        else Write(write=data, to=name)
        for name, data in row.files.items()
    ]
    if row.needs == "mcp":
        files.append(Write(write=NOTE_SERVER.read_text("utf-8"), to=NOTE_SERVER.name))
    task = TaskSpec(
        instruction=f"Task {MARK}{row.name}: {row.what}. Work in the current folder, with your own tools.",
        harness=_given(row, subject).model_copy(update=strictly),
        runtime=subject.runtime.model_copy(update={"prepare": [*subject.runtime.prepare, *files]}),
        evaluator=EvaluatorSpec(kind="command", run=row.check),
        limits=Limits(agent_seconds=agent_seconds, turns=TURNS),
        max_attempts=1,
        labels={"row": row.name},
    )
    return GroupSpec(task=task)
