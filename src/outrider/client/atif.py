"""Converts training rows to trajectories of ATIF 1.8, Harbor's interchange format.

Each row becomes one trajectory. All trajectories of a session have the same `session_id`. Invariant: a step with
metrics is one model call, with the ids and log-probabilities that were sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.environment import installed_version
from outrider.messages import Role
from outrider.trajectory import ChatRow, LogprobKind, Sample

SCHEMA = "ATIF-v1.8"
MEDIA_TYPES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
"""Media types of images that the format supports."""
SOURCES = {Role.SYSTEM.value: "system", Role.USER.value: "user"}
Trajectory = dict[str, Any]


def trajectory(sample: Sample, row: ChatRow) -> Trajectory:
    """Convert a row to a trajectory. `sample` has the row's token ids, and `row` has its messages.

    A reply is marked as copied context if the model did not sample the reply, or if this row does not train it. An
    image of a type that the format does not support becomes a text with the image's path or URL.
    """
    media = iter(image.media_type for image in sample.images)
    spans = iter(sample.turn_spans)
    steps: list[dict[str, Any]] = []
    for message in row.messages:
        content = content_of(message["content"], media)
        if message["role"] == Role.ASSISTANT.value:
            step = {"source": "agent", "message": content, **agent_fields(message)}
            if "weight" in message:
                step |= {"llm_call_count": 1, "metrics": metrics_of(sample, *next(spans))}
            if not message.get("weight"):
                step["is_copied_context"] = True
            steps.append(step)
        elif message["role"] == Role.TOOL.value:
            if not steps or steps[-1]["source"] != "agent":  # the row does not contain the tool call
                steps.append({"source": "agent", "message": "", "llm_call_count": 0, "is_copied_context": True})
            step = steps[-1]
            calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
            called = message.get("tool_call_id")
            result = {"source_call_id": called} if called in calls else {}
            step.setdefault("observation", {"results": []})["results"].append({**result, "content": content})
        else:
            steps.append({"source": SOURCES.get(message["role"], "system"), "message": content})
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    sampled = [end - start for start, end in sample.turn_spans]
    tools = {"tool_definitions": row.tools} if row.tools else {}
    return {
        "schema_version": SCHEMA,
        "session_id": sample.session_id,
        "trajectory_id": f"{sample.session_id}-{sample.attempt}-{sample.row}",
        "agent": {"name": "outrider", "version": installed_version("outrider"), **tools},
        "steps": numbered,
        "final_metrics": {
            "total_prompt_tokens": sum(start for start, _ in sample.turn_spans),
            "total_completion_tokens": sum(sampled),
            "total_steps": len(numbered),
        },
        "extra": {
            "group_id": sample.group_id,
            "sample_index": sample.sample_index,
            "row": sample.row,
            "kind": sample.kind.value,
            "label": sample.label,
            "reward": sample.reward,
            "metrics": sample.metrics,
            "stop_reason": sample.stop_reason.value,
            "labels": sample.labels,
            "logprob_kind": sample.logprob_kind.value,
            "policy_versions": [sample.min_version, sample.max_version],
        },
    }


def agent_fields(message: dict[str, Any]) -> dict[str, Any]:
    """Return the reasoning and the tool calls of an assistant message. If the arguments of a tool call are not a JSON
    object, they become `{"text": ...}`."""
    fields: dict[str, Any] = {}
    if (reasoning := message.get("reasoning_content")) is not None:
        fields["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        fields["tool_calls"] = [
            {
                "tool_call_id": call["id"],
                "function_name": call["function"]["name"],
                "arguments": arguments
                if isinstance(arguments := call["function"]["arguments"], dict)
                else {"text": str(arguments)},
            }
            for call in calls
        ]
    return fields


def metrics_of(sample: Sample, start: int, end: int) -> dict[str, Any]:
    """Return the metrics of one model call: its token ids and its log-probabilities. The log-probabilities are left out
    if the engine did not report them, or if the row does not train the call."""
    found: dict[str, Any] = {
        "prompt_tokens": start,
        "completion_tokens": end - start,
        "prompt_token_ids": sample.ids[:start].tolist(),
        "completion_token_ids": sample.ids[start:end].tolist(),
    }
    if sample.logprob_kind is not LogprobKind.NONE and sample.loss_mask[start:end].any():
        found["logprobs"] = sample.logprobs[start:end].tolist()
        found["extra"] = {
            "loss_mask": sample.loss_mask[start:end].tolist(),
            "policy_versions": sample.versions[start:end].tolist(),
        }
    return found


def content_of(content: str | list[dict[str, str]] | None, media: Iterator[str]) -> str | list[dict[str, Any]]:
    """Convert a message's content to ATIF's format. `media` yields the media types of the row's images, beginning with
    the first image of this message."""
    if not isinstance(content, list):
        return content or ""
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] != "image":
            parts.append({"type": "text", "text": part["text"]})
            continue
        place, kind = part.get("path") or part["url"], next(media)
        if kind in MEDIA_TYPES:
            parts.append({"type": "image", "source": {"media_type": kind, "path": place}})
        else:
            parts.append({"type": "text", "text": place})
    return parts
