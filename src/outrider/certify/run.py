"""A certification: a whole service in this process on the scripted model, and one session of the harness for a row.

It knows no terminal. Invariant: nothing of it is left when `certify` returns, but its certificate.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import msgspec

from outrider.api.server import serving
from outrider.certify.actor import Actor
from outrider.certify.judge import Evidence, RowVerdict, holds, judge
from outrider.certify.rows import FIRST_WORD, MARK, Row
from outrider.certify.tap import Tap, tapped
from outrider.client import AsyncClient
from outrider.config import Config, LanesConfig, ModelConfig, SandboxesConfig
from outrider.harnesses.presets import Certify
from outrider.plugins import resolve
from outrider.runtimes.base import RuntimeKind
from outrider.schemas import GroupView, SessionView
from outrider.service.service import Service
from outrider.spec import EvaluatorSpec, GroupSpec, HarnessSpec, Limits, RuntimeSpec, TaskSpec, Write
from outrider.tokens.rendering.tokenizer import Tokenizer

RENDERER = "qwen3"
MODEL = "outrider-check"
AT_ONCE = 2
"""Sessions that run side by side."""

TURNS = 24


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What is certified: a harness and its sandbox as a task names them, the dialect that it is to speak (None: any),
    and what is known of its tools."""

    name: str
    harness: HarnessSpec
    runtime: RuntimeSpec
    dialect: str | None = None
    hint: Certify = Certify()


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts, in the order of the rows. `ok` when it holds (see `judge.holds`)."""

    harness: str
    dialect: str | None
    runtime: str
    ok: bool
    rows: tuple[RowVerdict, ...]
    seconds: float


def default_runtime() -> str:
    """`namespace` where it works, else `process`."""
    runtime: RuntimeKind = resolve("runtime", "namespace")
    return "namespace" if runtime.available().ok else "process"


async def certify(
    subject: Subject,
    rows: Sequence[Row],
    *,
    agent_seconds: float = 180,
    watch: Callable[[RowVerdict], None] = lambda _: None,
) -> Certificate:
    """Run every row and judge it; `watch` is told each verdict as it comes.

    Raises what admission raises: a harness that is not installed or cannot be, a runtime that does not work here.
    """
    started = time.monotonic()
    tasks = {row.name: _task(row, subject, agent_seconds) for row in rows}
    with tempfile.TemporaryDirectory(prefix="outrider-check-") as data, as_file(_policy()) as policy:
        config = Config(
            port=0,
            data=Path(data),
            model=ModelConfig(tokenizer=str(policy), renderer=RENDERER, name=MODEL),
            lanes=LanesConfig(init=AT_ONCE, run=AT_ONCE, eval=AT_ONCE),
            sandboxes=SandboxesConfig(allow=(Path("/"),)),  # who certifies is who may read it
        )
        async with (
            Service(config) as service,
            serving(service) as url,
            tapped(service.node, (FIRST_WORD,)) as tap,
            AsyncClient(url) as client,
        ):
            tokenizer = await asyncio.to_thread(Tokenizer.load, policy)
            actor = Actor(tokenizer, str(policy), subject.hint, subject.runtime.workdir, tap.heard)
            await service.pool.add_engine(actor)
            court = _Court(client, actor, tap, subject)
            submitted = {(await client.submit(tasks[row.name])).id: row for row in rows}
            verdicts: dict[str, RowVerdict] = {}
            async for group in client.follow(samples=True):
                row = submitted[group.id]
                verdicts[row.name] = await court.judged(row, group)
                watch(verdicts[row.name])
                if len(verdicts) == len(rows):
                    break
    judged = tuple(verdicts[row.name] for row in rows)
    return Certificate(
        harness=subject.name,
        dialect=subject.dialect,
        runtime=subject.runtime.kind,
        ok=holds(judged),
        rows=judged,
        seconds=round(time.monotonic() - started, 2),
    )


class _Court:
    """Gathers what a row's session has left, and has it judged."""

    def __init__(self, client: AsyncClient, actor: Actor, tap: Tap, subject: Subject) -> None:
        self._client = client
        self._actor = actor
        self._tap = tap
        self._subject = subject

    async def judged(self, row: Row, group: GroupView) -> RowVerdict:
        [session] = group.sessions
        evidence = await self._evidence(session, group)
        return judge(row, evidence, hint=self._subject.hint, dialect=self._subject.dialect)

    async def _evidence(self, session: SessionView, group: GroupView) -> Evidence:
        assert session.result is not None
        key = f"{session.id}-{session.result.attempt}"
        return Evidence(
            result=session.result,
            samples=group.samples or (),
            turns=await self._client.turns(session.id),
            calls=[call for call in self._actor.calls if call.session_key == key],
            streams=self._tap.streams,
            in_time=FIRST_WORD in self._tap.in_time,
        )


def _task(row: Row, subject: Subject, agent_seconds: float) -> GroupSpec:
    strictly = {} if subject.harness.agent is not None else {"nonzero_exit": "error"}  # its log is wanted then
    files = [Write(write=text, to=name) for name, text in row.files.items()]
    task = TaskSpec(
        instruction=f"Task {MARK}{row.name}: {row.what}. Work in the current folder, with your own tools.",
        harness=subject.harness.model_copy(update=strictly),
        runtime=subject.runtime.model_copy(update={"prepare": [*subject.runtime.prepare, *files]}),
        evaluator=EvaluatorSpec(kind="command", run=row.check),
        limits=Limits(agent_seconds=agent_seconds, turns=TURNS),
        max_attempts=1,
        labels={"row": row.name},
    )
    return GroupSpec(task=task)


def _policy() -> Any:
    """The folder of the tokenizer that ships with the demo."""
    return files("outrider").joinpath("demo", "policy")
