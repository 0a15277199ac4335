"""Builds groups that grade the runs of earlier sessions again, with the same evaluator or another one.

`service.py` submits such a group. Invariants: the earlier sessions and verdicts do not change; a run is graded with the
files that were kept from it, or without files.
"""

from __future__ import annotations

from outrider.errors import Conflict, InvalidField, NotFound
from outrider.evaluators.nested import nested_specs
from outrider.lifecycle import SessionState
from outrider.service.admission import stored_group
from outrider.service.retention import removed_run
from outrider.spec import DiffSpec, RegradeSpec, StoredGroupSpec
from outrider.store.rows import SessionRow
from outrider.store.store import Store

HINT = "see how it ended: outrider show"
KEEP = "tasks with `evaluator.carry` and `evaluator.keep = true` keep what a grader needs"


async def regraded_group(
    store: Store, group_id: str, asked: RegradeSpec, *, tenant: str | None = None
) -> StoredGroupSpec:
    """Return the spec of a new group that grades the runs of the group `group_id` again. Runs that did not end by
    themselves are left out.

    Raises NotFound for an unknown group, for a group of another tenant, and if a run was removed. Raises Conflict if
    the group is not done, no run can be graded, or the task has several steps. Raises UnreadableTask if the stored task
    cannot be read, and InvalidField if the new evaluator needs files that were not kept.
    """
    spec = await stored_group(store, (await store.group(group_id, tenant=tenant)).id)
    # If the group is itself a regrading, the new group grades the original runs, so that no files are stored twice.
    rows = [await _run(store, id) for id in spec.regrades] or await store.sessions(group_id)
    if any(row.state is not SessionState.DONE for row in rows):
        raise Conflict(f"group {group_id} is not done", hint="wait for the group, or grade single sessions of it")
    runs = [row.id for row in rows if _can_be_graded(row)]
    if not runs:
        raise Conflict(f"no agent's run in group {group_id} ended by itself: there is nothing to grade", hint=HINT)
    return _regrading(spec, runs, asked)


async def regraded_session(
    store: Store, session_id: str, asked: RegradeSpec, *, tenant: str | None = None
) -> StoredGroupSpec:
    """Return the spec of a new group with one session that grades the run of `session_id` again. Raises the errors of
    `regraded_group`."""
    row = await store.session(session_id, tenant=tenant)
    spec = await stored_group(store, row.group_id)
    if spec.regrades:
        row = await _run(store, spec.regrades[row.sample_index])
    if row.state is not SessionState.DONE:
        raise Conflict(f"session {row.id} is {row.state}, not done", hint="wait until the session is done")
    if not _can_be_graded(row):
        raise Conflict(
            f"the agent's run in session {row.id} did not end by itself: there is nothing to grade", hint=HINT
        )
    return _regrading(spec, [row.id], asked)


async def _run(store: Store, session_id: str) -> SessionRow:
    """Return the session whose run is to be graded again. Raises NotFound if it was removed."""
    try:
        return await store.session(session_id)
    except NotFound as error:
        raise removed_run(session_id) from error


def _can_be_graded(row: SessionRow) -> bool:
    return row.result is not None and row.result.run_ending is not None


def _regrading(old: StoredGroupSpec, runs: list[str], asked: RegradeSpec) -> StoredGroupSpec:
    """Return the spec of a group that has the task of `old` and grades the sessions `runs` again. The evaluator gets
    the files that were kept at the first grading. Raises Conflict for a task with several steps, and InvalidField if
    the new evaluator needs files that were not kept."""
    task, first = old.task, old.task.evaluator
    if task.then:
        raise Conflict(
            "a task of several steps cannot be graded again: its sandbox was not kept as it was between the steps",
            hint="submit the task again with other evaluators",
        )
    evaluator = asked.evaluator or first
    if asked.evaluator is not None and evaluator.carry not in (None, first.carry):
        carried = "nothing was carried" if first.carry is None else f"only {first.carry!r} was carried"
        raise InvalidField(
            f"{carried} to the first grading: no other files can be graded again",
            field="evaluator.carry",
            hint="leave it out: the kept files are carried again",
        )
    # If `old` itself graded earlier runs again, its own `keep` is false, but the earlier sessions have kept the files.
    kept = first.carry if first.keep or old.regrades or isinstance(first.carry, DiffSpec) else None
    if kept is None:
        if evaluator.runtime is not None:
            raise InvalidField(
                "a sandbox is for files, and the files of these sessions were not kept",
                field="evaluator.runtime",
                hint=KEEP,
            )
        for part, field in nested_specs(evaluator):
            if part.kind == "command":
                raise InvalidField(
                    "a command grades files, and the files of these sessions were not kept",
                    field=f"{field.removeprefix('task.')}.kind",
                    hint=KEEP,
                )
    evaluator = evaluator.model_copy(update={"carry": kept, "keep": False})
    labels = {**task.labels, **asked.labels}
    return StoredGroupSpec(
        task=task.model_copy(update={"evaluator": evaluator, "labels": labels, "artifacts": []}),
        n=len(runs),
        priority=asked.priority,
        idempotency_key=asked.idempotency_key,
        callback_url=asked.callback_url,
        regrades=runs,
    )
