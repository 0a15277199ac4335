"""Creates the result record of a ProRL job from its session's stored turns, training rows and verdict.

The module does not read the store, and does not await. Invariants: every record has all fields. The record
of a session without a verdict has no reward, and its `resolved` is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from outrider.api.compat.endings import TIMEOUTS, UNGRADED_TIMEOUTS
from outrider.api.compat.prorl_request import Asked
from outrider.errors import Boundary, error_text
from outrider.lifecycle import StopReason
from outrider.messages import Message
from outrider.tokens.branches.classify import lineages
from outrider.trajectory import (
    BranchKind,
    BranchPolicy,
    FinishReason,
    Sample,
    SessionResult,
    StageSeconds,
    TokenMode,
    Turn,
    path_to,
    unpack_ids,
    unpack_logprobs,
)

SOLVED = 0.99
"""A session counts as solved if its reward is greater than this, as in ProRL's reward servers."""
UNUSED = (BranchKind.RETRY, BranchKind.ABORTED)


def result_record(
    asked: Asked, result: SessionResult, turns: Sequence[Turn], samples: Sequence[Sample], patch: str
) -> dict[str, Any]:
    """Return the result record of a job. `samples` has the session's training rows. `patch` is the diff of the agent's
    changes to a repository, or "". `turns[i].index` must be `i`."""
    path = main_path(turns)
    verdict = result.verdict
    report = None
    if verdict is not None:
        report = {
            "reward": verdict.reward,
            "metrics": verdict.metrics,
            "reason": verdict.reason,
            "stop_reason": result.stop_reason.value,
            "group_id": result.group_id,
            "session_id": result.session_id,
            "rows": len(samples),
        }
    return {
        "instance_id": asked.instance_id,
        "trajectory_id": asked.trajectory_id,
        "git_patch": patch,
        "success": verdict is not None,
        "finish": result.stop_reason is StopReason.COMPLETED,
        "resolved": None if verdict is None else verdict.reward > SOLVED,
        "report": report,
        "messages": _messages(path),
        "tools": list(path[0].tool_specs) if path else [],
        "end_properly": bool(path)
        and path[-1].finish is FinishReason.STOP
        and not any(turn.malformed_calls for turn in path),
        "error": _error(result),
        "traceback": None if result.error is None else result.error.log_tail,
        "critical_error": critical_error(result),
        "filter": not _trains(result, path, samples),
        "timing": _timing(result),
    }


def unreadable_record(asked: Asked, error: str) -> dict[str, Any]:
    """Return the record of a job that is done but whose stored result cannot be read."""
    timing = SessionResult(
        session_id="", group_id="", sample_index=0, attempt=0, stop_reason=StopReason.ERROR, seconds=StageSeconds()
    )
    record = result_record(asked, timing, (), (), "")
    return record | {"error": error, "critical_error": "final_result"}


def main_path(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns of the main conversation, up to its last reply. Turns of sub-agents are left out, and so are
    turns of a history that the agent replaced later. Without a reply, the list is empty."""
    lines = lineages(turns)
    leaf = next(
        (
            turn
            for turn in reversed(turns)
            if turn.reply is not None and lines[turn.index].main_line and lines[turn.index].kind not in UNUSED
        ),
        None,
    )
    return [] if leaf is None else path_to(leaf, turns)


def critical_error(result: SessionResult) -> str | None:
    """Return why a session has no verdict, or None if it has one. The reason is "timeout" if the session reached a time
    limit. Otherwise it is the stage in which the session failed or was cancelled: "init", "run" or "eval"."""
    if result.verdict is not None:
        return None
    if result.stop_reason in UNGRADED_TIMEOUTS:
        return "timeout"
    seconds = result.seconds
    graded = result.error is not None and result.error.boundary is Boundary.EVALUATOR
    if graded or result.run_reason is not None or seconds.eval or seconds.eval_wait:
        return "eval"
    return "run" if seconds.run or result.turns else "init"


def _trains(result: SessionResult, path: Sequence[Turn], samples: Sequence[Sample]) -> bool:
    """Return True if the job gives a trainer tokens to train on. If the engine reports no token ids, there are no
    training rows. In this case, return True if the task's branch policy trains the main conversation."""
    if result.verdict is None:
        return False
    if path and all(turn.mode is TokenMode.TEXT for turn in path):
        return result.policy.get(BranchKind.MAIN, BranchPolicy.TRAIN) is BranchPolicy.TRAIN
    return any(sample.reward is not None and sample.trained_tokens for sample in samples)


def _error(result: SessionResult) -> str | None:
    if result.error is not None:
        return f"{result.error.code}: {error_text(result.error)}"
    return result.stop_reason.value if result.verdict is None else None


def _timing(result: SessionResult) -> dict[str, float | bool]:
    seconds, over = result.seconds, result.stop_reason in TIMEOUTS | UNGRADED_TIMEOUTS
    others = seconds.queued + seconds.ready + seconds.eval_wait + seconds.stop
    return {
        "init_time": seconds.init,
        "run_time": seconds.run,
        "eval_time": seconds.eval,
        "others_time": others,
        "counted_elapsed": seconds.init + seconds.run + seconds.eval,
        "timeout_triggered": over,
        "init": seconds.init,
        "run": seconds.run,
        "eval": seconds.eval,
        "others": others,
        "timeout": over,
    }


def _messages(path: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return the messages of a conversation. Each sampled reply comes with the token ids of its prompt, its own token
    ids and their log-probabilities. Other messages have no token ids."""
    messages: list[dict[str, Any]] = []
    before: list[int] = []
    for turn in path:
        messages += map(_message, turn.messages)
        prompt = before + unpack_ids(turn.prompt_delta).tolist()
        output = unpack_ids(turn.output_ids).tolist()
        before = prompt + output
        if turn.reply is not None:
            ids: dict[str, Any] = {"token_ids": output}
            if turn.mode is not TokenMode.TEXT:
                ids |= {"input_ids": prompt, "logprobs": unpack_logprobs(turn.logprobs).tolist()}
            messages.append(_message(turn.reply) | ids)
    return messages


def _message(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role.value, "content": message.content, "token_ids": []}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"name": call.name, "arguments": _arguments(call.arguments)} for call in message.tool_calls
        ]
    return shown


def _arguments(text: str) -> Any:
    """Return the arguments of a tool call as a dict. If they are not a JSON object, return the text."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
