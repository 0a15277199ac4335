"""Reads the settings that all bridges share, and converts a dataset row to a task.

Nothing here awaits or depends on a trainer. Invariant: a task shares no object with the settings, so no rollout can
change another rollout's task.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import numpy as np
from pydantic import Field, ValidationError

from outrider.environment import DEFAULT_URL, environment
from outrider.errors import InvalidField
from outrider.faults import complaints, fault_text
from outrider.spec import Name, SamplingSpec, Seconds, Spec, TaskSpec
from outrider.tasks.datasets import filled, merged
from outrider.tasks.row_values import known_columns
from outrider.text_files import MAX_TOML, read_text_file, read_toml_file

S = TypeVar("S", bound="BridgeSettings")

OTHER_NAMES = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
"""Sampling parameters that SGLang (the keys) and vLLM (the values) name differently. `task.sampling` uses vLLM's
names."""
WITHOUT_EFFECT_ON_IDS = frozenset(
    {
        "logprobs",
        "prompt_logprobs",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "no_stop_trim",
        "detokenize",
    }
)
"""Sampling parameters that change only what an engine reports, or how the engine makes text from the sampled ids. The
bridges drop these parameters, because the gateway itself makes the text from the ids."""
NEUTRAL: Mapping[str, Any] = {"min_tokens": (0, 1), "min_new_tokens": (0, 1), "n": (1,), "ignore_eos": (False,)}
"""Sampling parameters that a task cannot have, each with the values that have no effect. These values are accepted and
ignored; any other value is refused."""


PLAIN_SAMPLING = {
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Values of sampling parameters that leave the model's distribution unchanged. NeMo RL computes importance weights from
the temperature and top_p only, prime-rl from the temperature only. A task for NeMo RL or prime-rl therefore gets each
of these values, unless the task itself sets the parameter. The agent cannot change the values. NeMo RL's servers also
refuse a top_k."""


class BridgeSettings(Spec):
    """The settings that all bridges share.

    url, token: the service's address and token. OUTRIDER_URL and OUTRIDER_TOKEN override them.
    task: the fields that all tasks have in common. "{row.NAME}" stands for the column NAME of the dataset row.
    task_column: the column with the row's own task, an object or JSON. Its fields override those of `task`.
    rows: "all" for all training rows of a session, or "main" for the main conversation's row only.
    max_row_tokens: the length in tokens to which longer rows are cut; None for no limit.
    metrics: names of the evaluator's metrics to pass to the trainer. Each verdict must have all these metrics.
    priority, evaluation_priority: the priorities of groups for training and of groups for evaluation.
    min_usable, expires_seconds: the fields of the same names in groups for training (`spec.GroupSpec`).
    """

    url: Name = DEFAULT_URL
    token: Name | None = None
    task: dict[Name, Any] = Field(default_factory=dict)
    task_column: Name = "task"
    rows: Literal["all", "main"] = "all"
    max_row_tokens: Annotated[int, Field(ge=2)] | None = None
    metrics: list[Name] = Field(default_factory=list)
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    evaluation_priority: Annotated[int, Field(ge=-1000, le=1000)] = 100
    min_usable: Annotated[int, Field(ge=1)] | None = None
    expires_seconds: Seconds | None = None


def read_settings(kind: type[S], given: Mapping[str, Any] | None, *, source: str, variable: str) -> S:
    """Return the settings in `given`, overridden by the environment variable `variable`.

    The variable holds a JSON object, or @FILE for a JSON or TOML file. $OUTRIDER_URL and $OUTRIDER_TOKEN override the
    address and the token. `source` is the name of the place where `given` comes from, for error messages. Raises
    InvalidField for a wrong setting; the error names the setting and its source.
    """
    if given is not None and not isinstance(given, Mapping):
        raise InvalidField(f"{source} is {given!r}; it must be an object", field=source)
    text = environment(variable)
    over = _settings_of_variable(text, variable) if text else {}
    try:
        settings = kind.model_validate(merged(plain(given or {}), over))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        of = variable if first["loc"] and first["loc"][0] in over else source
        if first["type"] != "extra_forbidden":
            raise InvalidField(f"{of}.{path}: {fault_text(first)}", field=f"{of}.{path}") from error
        close = get_close_matches(path, kind.model_fields, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(kind.model_fields)}"
        raise InvalidField(f"{of} has the unknown key {path!r}", field=f"{of}.{path}", hint=hint) from error
    _check_task_fields(settings.task, f"{variable if 'task' in over else source}.task")
    url, token = environment("OUTRIDER_URL"), environment("OUTRIDER_TOKEN")
    where = "OUTRIDER_URL" if url else f"{variable if 'url' in over else source}.url"
    return settings.model_copy(
        update={"url": checked_url(url or settings.url, where), "token": token or settings.token}
    )


def _check_task_fields(task: Mapping[str, Any], source: str) -> None:
    """Raise InvalidField if the setting `task` has an unknown field, at any depth. Values are not checked, because they
    may be placeholders such as "{row.NAME}", and a row's own task may override them."""
    try:
        TaskSpec.model_validate(task)
    except ValidationError as error:
        for fault in complaints(error):
            if fault["type"] == "extra_forbidden":
                field = ".".join((source, *map(str, fault["loc"])))
                raise InvalidField(f"{field}: {fault_text(fault, TaskSpec)}", field=field) from error


def checked_url(url: str, source: str) -> str:
    """Check a service's address, and return it in the form that AsyncClient takes, such as `http://HOST:PORT`. Raises
    InvalidField naming `source`, the place where the address was set."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidField(f"{source} is {url!r}, which is no address: {error}", field=source) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        hint = f"write {source}=http://{url}" if "://" not in url else "write http://HOST:PORT or https://HOST:PORT"
        raise InvalidField(f"{source} is {url!r}, which is no http address", field=source, hint=hint)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise InvalidField(
            f"{source} is {url!r}; it must end after the host and port",
            field=source,
            hint=f"write {source}={parts.scheme}://{parts.netloc}",
        )
    if port is None and parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1"):
        raise InvalidField(
            f"{source} is {url!r}, which names no port",
            field=source,
            hint=f"write {source}=http://{parts.netloc}:8700 (`outrider serve` listens there), or :80 if you mean it",
        )
    return f"{parts.scheme}://{parts.netloc}"


def plain(value: Any, *, without_none: bool = False) -> Any:
    """Convert mappings and sequences of other types, such as OmegaConf's and numpy's, to dicts and lists. With
    `without_none`, fields whose value is None are left out."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        kept = {name: inner for name, inner in value.items() if inner is not None or not without_none}
        return {name: plain(inner, without_none=without_none) for name, inner in kept.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(inner, without_none=without_none) for inner in value]
    return value


def task_for(
    settings: BridgeSettings,
    row: Mapping[str, Any],
    *,
    prompt: Any,
    sampling: Mapping[str, Any],
    labels: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the task of a dataset row: the setting `task`, overridden by the row's own task (`task_column`).

    prompt: used if the task has no instruction. If `prompt` is a list of messages, the last user message is the
        instruction.
    sampling: the trainer's sampling parameters. They override the task's sampling parameters, because the trainer
        computes importance weights with them.
    labels: labels to add. If the task has a label with the same name, the task's value is used.

    Raises InvalidField for a row that cannot be converted.
    """
    if settings.task_column not in row and "task_column" in settings.model_fields_set:
        raise InvalidField(
            f"the dataset row has no column {settings.task_column!r}, which the setting task_column names",
            field="task_column",
            hint=known_columns(row),
        )
    own = row.get(settings.task_column)
    if isinstance(own, str):
        own = json_object(own, f"column {settings.task_column!r}")
    if not isinstance(own, Mapping | None):
        raise InvalidField(
            f"column {settings.task_column!r} is a {type(own).__name__}; it must be an object or JSON",
            field=settings.task_column,
        )
    # Leave out fields that are None. A row of an Arrow table has the fields of all rows. A field that the row itself
    # lacks is None.
    task = merged(plain(filled(settings.task, plain(row), "the dataset row")), plain(own or {}, without_none=True))
    if "instruction" not in task:
        task["instruction"] = _text_of(plain(prompt))
    for part in ("sampling", "labels", "limits"):
        if not isinstance(task.get(part), Mapping | None):
            raise InvalidField(f"task.{part} is {task[part]!r}; it must be an object", field=f"task.{part}")
    task["sampling"] = merged(task.get("sampling") or {}, sampling_of(sampling))
    known = {name: str(value) for name, value in labels.items() if value is not None}
    task["labels"] = known | dict(task.get("labels") or {})
    return task


def group_of(
    settings: BridgeSettings, task: Mapping[str, Any], *, n: int = 1, evaluating: bool = False
) -> dict[str, Any]:
    """Return a new group of `n` sessions of a task, ready to submit. The group has the priority that the settings give
    for training or for evaluation. Each call makes a new idempotency key."""
    group = {"task": task, "n": n, "idempotency_key": secrets.token_hex(16)}
    if evaluating:
        return group | {"priority": settings.evaluation_priority}
    fields = {"min_usable": settings.min_usable, "expires_seconds": settings.expires_seconds}
    return group | fields | {"priority": settings.priority}


def refuse_min_usable(settings: BridgeSettings, n: int) -> None:
    """Raise InvalidField if the setting `min_usable` is below `n`, the number of sessions of a group. This check is for
    trainers that use a group only if all its sessions were graded: the sessions that the service stops would make every
    group unusable."""
    if settings.min_usable is not None and settings.min_usable < n:
        instead = ", or set complete to any" if "complete" in type(settings).model_fields else ""
        raise InvalidField(
            f"min_usable is {settings.min_usable}, and a group has {n} sessions: the sessions that the service then"
            " stops would make every group unusable",
            field="min_usable",
            hint=f"leave min_usable out{instead}",
        )


def refuse_images(images: Any, owner: str, *, field: str) -> None:
    """Raise InvalidField, with the field `field`, if `images` is not empty. The error message says that `owner` has
    images."""
    if images:
        message = f"{owner} has images, which this bridge does not hand over"
        raise InvalidField(message, field=field, hint="use tasks without images")


def sampling_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a trainer's sampling parameters, named as in vLLM or SGLang, to fields of `task.sampling`. Raises
    InvalidField for a parameter that changes the sampled ids but cannot be in a task."""
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        ours, value = OTHER_NAMES.get(name, name), plain(value)
        if value is None or value in ([], {}) or ours in WITHOUT_EFFECT_ON_IDS:
            continue
        if ours in SamplingSpec.model_fields:
            # A trainer's configuration may have an integer, such as 1, where a task needs a float.
            try:
                found[ours] = float(value) if ours not in ("top_k", "max_tokens", "seed", "thinking") else value
            except (TypeError, ValueError) as error:
                raise InvalidField(
                    f"the sampling parameter {name}={value!r} is no number", field=f"sampling.{name}"
                ) from error
        elif value not in NEUTRAL.get(ours, ()):
            raise InvalidField(
                f"the sampling parameter {name}={value!r} cannot be passed to the agents' model calls",
                field=f"sampling.{name}",
                hint="leave it out: each agent decides about its stops and forms of reply",
            )
    return found


def _settings_of_variable(text: str, variable: str) -> dict[str, Any]:
    if not text.startswith("@"):
        return json_object(text, variable)
    path = Path(text[1:])
    try:
        if path.suffix == ".toml":
            return read_toml_file(path, field=variable)
        content = read_text_file(path, field=variable, limit=MAX_TOML)
    except InvalidField as error:
        raise InvalidField(f"{variable} names {path}, which cannot be read: {error.message}", field=variable) from error
    return json_object(content, f"{path}, named by {variable},")


def json_object(text: str, source: str) -> dict[str, Any]:
    """Parse `text` as a JSON object. Raises InvalidField naming `source`, the place where the text comes from."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidField(
            f"{source} is not JSON: {error.msg} at character {error.pos + 1}", field=source, hint="write a JSON object"
        ) from error
    # `json.loads` raises these for a number with thousands of digits, and if the nesting is too deep.
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{source} is no JSON that can be used: {error}", field=source) from error
    if not isinstance(value, dict):
        raise InvalidField(f"{source} is a JSON {type(value).__name__}; it must be an object", field=source)
    return value


def _text_of(prompt: Any) -> str:
    hint = "give every row a prompt, or `instruction` in its task or in the setting `task`"
    wrong = "no instruction: neither its task nor a prompt with a user message"
    if isinstance(prompt, str) and prompt:
        return prompt
    for message in reversed(prompt) if isinstance(prompt, list) else ():
        if not isinstance(message, dict):
            wrong = f"a prompt with a {type(message).__name__} where a message must be an object"
            break
        if message.get("role") != "user":
            continue
        content = message.get("content")
        if not isinstance(content, str | list):
            wrong = f"a user message whose content is a {type(content).__name__}"
            break
        parts = [{"text": content}] if isinstance(content, str) else content
        if odd := [part for part in parts if not isinstance(part, dict)]:
            wrong = f"a user message with a part that is a {type(odd[0]).__name__}"
            break
        if any("image" in str(part.get("type")) for part in parts):
            wrong = "a user message with an image, which this bridge does not hand over"
            break
        if text := "\n".join(str(part.get("text") or "") for part in parts):
            return text
        break
    raise InvalidField(f"the dataset row has {wrong}", field="instruction", hint=hint)
