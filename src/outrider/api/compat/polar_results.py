"""Creates replies in Polar's format from the store's rows: statuses, results, traces and completions.

Traces depend only on a session's turns and result. A trace trains exactly the tokens that Outrider's own training rows
train (`tokens/samples.py`). Invariant: a session without a verdict has no reward, and its traces train no tokens. The
status of such a session is TIMEOUT if it reached a time limit while it ran, and ERROR otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.api.compat.endings import Ending, ending_of, why_ungraded
from outrider.api.compat.polar_request import (
    ALONE_LABEL,
    BUILDER_LABEL,
    HARNESS_LABEL,
    MODEL_LABEL,
    OWN_METADATA,
    SYSTEM,
    TASK_LABEL,
    UNGRADED_LABEL,
)
from outrider.api.compat.routes import encoded
from outrider.dialects.chat.reply import message_object
from outrider.lifecycle import GroupState, SessionState
from outrider.messages import Image, Message, Text
from outrider.service.admission import stored_group
from outrider.service.principals import Principal
from outrider.store.rows import GroupRow, SessionRow
from outrider.tokens.samples import POLICY, build_samples, model_calls
from outrider.trajectory import (
    FinishReason,
    LogprobKind,
    Sample,
    SessionResult,
    StageSeconds,
    Turn,
    VersionSpan,
    path_to,
    prompt_of,
    unpack_ids,
    unpack_logprobs,
)

if TYPE_CHECKING:
    from outrider.service.service import Service

PolarObject = dict[str, Any]
"""A JSON object in Polar's format. It may contain numpy arrays, which `encoded` turns into lists."""

STATES: Mapping[SessionState, str] = {
    SessionState.QUEUED: "REGISTERED",
    SessionState.INITIALIZING: "INITIALIZING",
    SessionState.READY: "READY",
    SessionState.RUNNING: "RUNNING",
    SessionState.EVALUATING: "EVALUATING",
}
"""Polar's status for each state of a session that is not done."""
ENDINGS: Mapping[Ending, str] = {"completed": "COMPLETED", "failed": "ERROR", "timeout": "TIMEOUT"}
"""Polar's status for each way in which a session can end."""
MOST_LISTED = 1000
"""Maximum number of entries in a list of tasks or sessions."""
MOST_SEARCHED = 10_000
"""How many of the newest tasks a filter looks at."""


def status_of_task(row: GroupRow) -> str:
    """Return a task's status. A task is `failed` if it is done and no session has a reward."""
    if row.state is GroupState.ACTIVE:
        return "cancelling" if row.cancelled else "running"
    if row.cancelled:
        return "cancelled"
    return "completed" if row.rewarded else "failed"


def status_of_session(row: SessionRow) -> str:
    return STATES[row.state] if row.result is None else status_of_result(row.result)


def status_of_result(result: SessionResult) -> str:
    return ENDINGS[ending_of(result)]


def error_of(result: SessionResult) -> str | None:
    """Return why a session has no reward, or None if it has one."""
    return why_ungraded(result, run="session")


def timing_of(seconds: StageSeconds) -> PolarObject:
    """Return how long Polar's four stages took, in whole milliseconds. Time in the state READY is in none of them."""
    stages = {
        "register_to_init_queue_ms": seconds.queued,
        "init_ms": seconds.init,
        "run_ms": seconds.run,
        "postrun_ms": seconds.eval_wait + seconds.eval + seconds.stop,
    }
    return {name: round(each * 1000) for name, each in stages.items()}


def task_id_of(row: GroupRow) -> str:
    return row.labels[TASK_LABEL]


def graded(row: GroupRow) -> bool:
    """Return True if the task has an evaluator."""
    return UNGRADED_LABEL not in row.labels


class PolarReader:
    """Reads tasks and sessions from the store, and returns them in Polar's format. Raises NotFound for removed
    groups."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def callback(self, row: GroupRow) -> bytes:
        """Return the JSON body of a group's callback. It is the TaskResult of a task, or the SessionResult of a session
        that was created without a task."""
        alone = ALONE_LABEL in row.labels
        result = (await self._results(row))[0] if alone else await self.task_result(row)
        return await self._service.reader.offload(partial(encoded, result))

    async def task_result(self, row: GroupRow) -> PolarObject:
        """Return a task's TaskResult. It contains the sessions' results only after the task has ended. If it contained
        them earlier, each poll of a running task would return the same traces again."""
        results = await self._results(row) if row.state is GroupState.DONE else []
        return {"task_id": task_id_of(row), "status": status_of_task(row), "results": results, "result_paths": []}

    async def task_status(self, row: GroupRow) -> PolarObject:
        return {**await self.task_result(row), "total_sessions": row.n, "completed_sessions": row.done}

    async def session_result(self, row: GroupRow, session: SessionRow) -> PolarObject:
        """Return the SessionResult of a done session."""
        assert session.result is not None
        [result] = await self._results(row, [session])
        return result

    async def _results(self, row: GroupRow, sessions: Sequence[SessionRow] | None = None) -> list[PolarObject]:
        spec = await stored_group(self._service.store, row.id)
        request = spec.translated.request if spec.translated else {}
        rows = await self._service.store.sessions(row.id) if sessions is None else sessions
        results = [each.result for each in rows if each.result is not None]
        build = partial(trajectory_of, request=request)
        # Sessions without turns get a trajectory, too: the trajectory's `error` says why there are no traces.
        trajectories = await self._service.reader.built(results, build)
        done = [each for each in rows if each.result]
        return [result_of(each, trajectory, request) for each, trajectory in zip(done, trajectories, strict=True)]

    async def newest(
        self, caller: Principal, wanted: Callable[[GroupRow], bool], *, limit: int, since: float = -1e15
    ) -> list[GroupRow]:
        """Return up to `limit` tasks of the caller's tenant for which `wanted` is true, newest first."""
        found: list[GroupRow] = []
        before: tuple[float, str] | None = None
        for _ in range(MOST_SEARCHED // MOST_LISTED):
            page = await self._service.store.translated_groups(
                caller.tenant, SYSTEM, since=since, before=before, limit=MOST_LISTED
            )
            found += filter(wanted, page)
            if len(found) >= limit or len(page) < MOST_LISTED:
                break
            before = page[-1].created, page[-1].id
        return found[:limit]

    async def summary(self, row: GroupRow) -> PolarObject:
        """Return a task's entry in the list of tasks. Its means cover the sessions that have ended."""
        sessions = await self._service.store.sessions(row.id)
        done = [each.result for each in sessions if each.result is not None]
        merged = row.labels.get(BUILDER_LABEL) == "prefix_merging"
        return {
            "task_id": task_id_of(row),
            "status": status_of_task(row),
            "harness": row.labels.get(HARNESS_LABEL),
            "model": row.labels.get(MODEL_LABEL) or None,
            "num_samples": row.n,
            "completed_sessions": row.done,
            "errored_sessions": sum(status_of_result(each) == "ERROR" for each in done),
            "mean_reward": row.reward_total / row.rewarded if row.rewarded and graded(row) else None,
            # The builder prefix_merging makes one trace of each training row, and the store has the number of rows. The
            # builder per_request makes other traces, and counting them would require building them.
            "mean_traces": _mean(each.samples for each in done) if merged else None,
            "mean_completions": _mean(each.turns for each in done),
            "created_at": row.created,
            "updated_at": max((each.updated for each in sessions), default=row.created),
            "source": "store",
        }


def session_summary(group: GroupRow, row: SessionRow) -> PolarObject:
    """Return a session's entry in the list of its task's sessions."""
    result = row.result
    verdict = result.verdict if result and graded(group) else None
    return {
        "session_id": row.id,
        "task_id": task_id_of(group),
        "status": status_of_session(row),
        "node_id": row.node,
        "reward": verdict.reward if verdict else None,
        "timing": timing_of(result.seconds) if result else None,
        "error": error_of(result) if result else None,
    }


def result_of(row: SessionRow, trajectory: PolarObject, request: Mapping[str, Any]) -> PolarObject:
    result = row.result
    assert result is not None
    verdict = result.verdict if request["graded"] else None
    own = {
        "group_id": result.group_id,
        "session_id": result.session_id,
        "sample_index": result.sample_index,
        "attempt": result.attempt,
        "stop_reason": result.stop_reason.value,
        "error": None
        if result.error is None
        else {"boundary": result.error.boundary.value, "code": result.error.code, "retryable": result.error.retryable},
        "reward": verdict.reward if verdict else None,
        "metrics": verdict.metrics if verdict else {},
        "reason": verdict.reason if verdict else None,
    }
    return {
        "session_id": request.get("session_id", row.id),
        "task_id": request["task_id"],
        "status": status_of_result(result),
        "trajectory": trajectory,
        "timing": timing_of(result.seconds),
        "node_id": row.node,
        "error": error_of(result),
        "metadata": {**request["metadata"], OWN_METADATA: own},
    }


def trajectory_of(turns: Sequence[Turn], result: SessionResult, *, request: Mapping[str, Any]) -> PolarObject:
    """Build a session's trajectory, with the builder that the request names. `turns[i].index` must be `i`."""
    status, strategy = status_of_result(result), request["builder"]["strategy"]
    build = merged_traces if strategy == "prefix_merging" else single_traces
    traces = [] if status == "ERROR" else build(turns, result)
    for trace in traces:
        if result.verdict is None:
            trace["loss_mask"] = [0] * len(trace["response_ids"])
        if not request["graded"]:
            trace["reward"] = None
    statistics = {
        "builder": strategy,
        "completions": len(turns),
        "traces": len(traces),
        "sampled_tokens": result.tokens.sampled,
        "trained_tokens": 0 if result.verdict is None else result.tokens.trained,
    }
    return {"status": status, "metadata": statistics, "traces": traces, "error": error_of(result)}


def merged_traces(turns: Sequence[Turn], result: SessionResult) -> list[PolarObject]:
    """Build traces with the builder prefix_merging. Each trace is a training row of Outrider. The response of a trace
    begins at the row's first reply."""
    return [_merged_trace(sample, [turns[index] for index in sample.turns]) for sample in build_samples(turns, result)]


def _merged_trace(sample: Sample, path: Sequence[Turn]) -> PolarObject:
    start = sample.prompt_length
    response = []
    for number, turn in enumerate(path):
        response += [*map(chat_message, turn.messages)] if number else []
        response += [chat_message(turn.reply)] if turn.reply is not None else []
    return {
        "prompt_ids": sample.ids[:start],
        "response_ids": sample.ids[start:],
        "loss_mask": sample.loss_mask[start:],
        "prompt_messages": [*map(chat_message, path[0].messages)],
        "response_messages": response,
        "tools": list(path[0].tool_specs) or None,
        "finish_reason": finish_reason(path[-1]),
        # A trace has all of its log-probabilities or none: if one is missing, all are left out.
        "response_logprobs": None if sample.logprob_kind is LogprobKind.NONE else sample.logprobs[start:],
        "reward": sample.reward,
        "metadata": {
            **_about(sample.kind.value, sample.label, sample.depth, path),
            "row": sample.row,
            "policy_versions": [[span.version, span.start - start, span.end - start] for span in sample.version_spans],
            "turn_rewards": list(sample.turn_rewards),
        },
    }


def single_traces(turns: Sequence[Turn], result: SessionResult) -> list[PolarObject]:
    """Build traces with the builder per_request: one for each turn with tokens to train on. A trace has the reward of
    the training row that contains its turn. Other turns, such as the generation of a title, have no trace."""
    traces = []
    verdict = result.verdict
    for call in model_calls(turns, {**POLICY, **result.policy}):
        turn = turns[call.index]
        if call.row is None or not turn.output_ids:
            continue
        path = path_to(turn, turns)
        count = len(turn.output_ids) // 4
        versions = turn.versions or (VersionSpan(0, 0, count),)
        traces.append(
            {
                "prompt_ids": unpack_ids(prompt_of(path)),
                "response_ids": unpack_ids(turn.output_ids),
                "loss_mask": [1] * count,
                "prompt_messages": messages_before(path),
                "response_messages": [chat_message(turn.reply)] if turn.reply is not None else [],
                "tools": list(path[0].tool_specs) or None,
                "finish_reason": finish_reason(turn),
                "response_logprobs": unpack_logprobs(turn.logprobs)
                if turn.logprob_kind is not LogprobKind.NONE
                else None,
                "reward": verdict.rows.get(call.row, verdict.reward) if verdict else None,
                "metadata": {
                    **_about(call.kind.value, call.label, call.depth, [turn]),
                    "row": call.row,
                    "policy_versions": [
                        [span.version, span.start, span.end] for span in versions if span.end > span.start
                    ],
                    "turn_rewards": [verdict.turns.get(turn.index) if verdict else None],
                },
            }
        )
    return traces


def _about(kind: str, label: str, depth: int, path: Sequence[Turn]) -> PolarObject:
    return {
        "kind": kind,
        "label": label,
        "depth": depth,
        "turns": [turn.index for turn in path],
        "logprob_kind": path[-1].logprob_kind.value,
        "altered": [turn.index for turn in path if turn.altered],
    }


def messages_before(path: Sequence[Turn]) -> list[PolarObject]:
    """Return all messages that the model got for the last turn of `path`: those of the last request and of the
    conversation before it. `path` has the turns of a conversation, from its first turn on."""
    found = []
    for turn in path:
        found += [chat_message(message) for message in turn.messages]
        if turn is not path[-1] and turn.reply is not None:
            found.append(chat_message(turn.reply))
    return found


def finish_reason(turn: Turn) -> str:
    if turn.finish is FinishReason.STOP and turn.reply is not None and turn.reply.tool_calls:
        return "tool_calls"
    return turn.finish.value


def chat_message(message: Message) -> PolarObject:
    """Convert a message to the format of Chat Completions. An image is represented by its URL, or by the digest under
    which its bytes are stored."""
    found = message_object(message)
    if any(isinstance(part, Image) for part in message.parts):
        found["content"] = [_part(part) for part in message.parts]
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    return found


def _part(part: Text | Image) -> PolarObject:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.url or f"sha256:{part.digest}"}}


def completion_of(turn: Turn, turns: Sequence[Turn], model: str) -> PolarObject:
    """Return the CompletionRecord of a model call. `request` and `response` are in the format of Chat Completions,
    whichever API the call used. `original_request` is empty, because the service does not store the client's bytes."""
    path = path_to(turn, turns)
    count = len(turn.output_ids) // 4
    choice = {
        "index": 0,
        "message": None if turn.reply is None else chat_message(turn.reply),
        "finish_reason": finish_reason(turn),
    }
    return {
        "completion_id": f"{turn.index:04d}",
        "timestamp": turn.timings.received,
        "request": {
            "model": model,
            "messages": messages_before(path),
            "tools": list(path[0].tool_specs) or None,
            **turn.sampling,
        },
        "original_request": {},
        "response": {
            "model": model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": turn.prompt_length,
                "completion_tokens": count,
                "total_tokens": turn.prompt_length + count,
            },
        },
        "metadata": {
            "api_type": turn.dialect,
            "engine": turn.engine,
            "prompt_ids": unpack_ids(prompt_of(path)),
            "response_ids": unpack_ids(turn.output_ids),
            "response_logprobs": unpack_logprobs(turn.logprobs) if turn.logprob_kind is not LogprobKind.NONE else None,
            "policy_versions": [[span.version, span.start, span.end] for span in turn.versions],
            "parent": turn.parent,
        },
    }


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
