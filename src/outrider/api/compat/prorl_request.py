"""Parses the requests of ProRL Agent's clients, and translates a job to a group of one session.

A job has an instance, which is a row of a data set. A handler in the operator's settings (`[prorl.handlers.NAME]`)
turns the instance into a task. A handler is a task file whose placeholders are filled with the instance's columns, or
the adapter for a public data set. Invariants: an instance or sampling parameter that cannot be translated is refused
with an error that names it; equal requests give equal groups.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import ConfigDict, Field, StringConstraints

from outrider.config import Config, ProrlHandlerConfig
from outrider.errors import InvalidField, RequestError
from outrider.service.admission import validate_group
from outrider.spec import GroupSpec, Name, Spec
from outrider.tasks.adapters import ADAPTERS
from outrider.tasks.dataset_rows import Additions
from outrider.tasks.datasets import filled, with_texts
from outrider.tasks.drafts import example_of, whole
from outrider.text_files import read_toml_file

JOB_LABEL = "prorl.job"
"""Name of the label with the job's id. The job's group has this label."""
REQUEST_LABEL = "prorl.request"
"""Name of the label with a digest of the request. The job's group has this label."""
IDEMPOTENCY_PREFIX = "prorl:"
"""The idempotency key of a job's group consists of this prefix and the job's id."""
THE_INSTANCE = "the instance"

JobId = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=1, le=1 << 30)]


class Instance(Spec):
    """The instance of a job, which is a row of a data set. It may have further columns."""

    model_config = ConfigDict(extra="allow")

    data_source: Name = "swebench"
    instance_id: Name | None = None
    trajectory_id: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | Name
    extra_info: dict[str, Any] | str | None = None

    @property
    def id(self) -> str:
        """The instance's id. If it is missing, it is computed from `extra_info`, as ProRL does. Raises InvalidField if
        `extra_info` is missing, too."""
        if self.instance_id is not None:
            return self.instance_id
        about = self.extra_info
        if isinstance(about, str):
            try:
                about = json.loads(about)
            except (ValueError, RecursionError):
                about = None
        parts = [about.get(name) for name in ("name", "split", "index")] if isinstance(about, Mapping) else [None]
        if any(not isinstance(part, str | int) or part == "" for part in parts):
            raise InvalidField(
                "the instance has no instance_id, and no extra_info with name, split and index to make one of",
                field="instance.instance_id",
                hint="give the instance an id",
            )
        return "_".join(map(str, (self.data_source, *parts)))

    def columns(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True) | {"instance_id": self.id, "data_source": self.data_source}


class SamplingParameters(Spec):
    """ProRL's sampling parameters: one flat object with parameters for the model, the tokens and the agent. Null means
    that a parameter is not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: Count | None = None
    max_output_tokens: Count | None = None
    max_model_len: Count | None = None
    max_iterations: Annotated[int, Field(ge=1, le=100_000)] | None = None
    enable_thinking: bool | None = None
    token_level_generation: bool | None = None
    custom_tokenizer: str | None = None
    model: str | None = None
    api_key: str | None = None
    log_completions: bool | None = None
    modify_params: bool | None = None
    native_tool_calling: bool | None = None
    ensure_thinking_end_properly: bool | None = None
    strict_loop_detector: bool | None = None
    enable_vision: bool | None = None
    enable_a11y_tree: bool | None = None


SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""ProRL's parameters that have the same name and meaning among a task's sampling parameters."""
AGENTS_OWN: dict[str, bool] = {
    "native_tool_calling": False,
    "ensure_thinking_end_properly": True,
    "strict_loop_detector": True,
    "enable_vision": True,
    "enable_a11y_tree": True,
}
"""The switches for ProRL's own agent. Each is mapped to the value that is refused, because Outrider's agents cannot do
what this value requests. The opposite value is accepted and ignored."""
REFUSABLE = (*AGENTS_OWN, "max_model_len", "token_level_generation")
"""Parameters that a handler may list in its setting `ignored`. They are then accepted and ignored."""


class ProcessSpec(Spec):
    """Body of `/process`. If `job_id` is missing, the service chooses an id."""

    instance: Instance
    sampling_params: SamplingParameters
    job_id: JobId | None = None


class CancelSpec(Spec):
    """Body of `/cancel`."""

    job_id: JobId


class AddressSpec(Spec):
    """Body of `/add_llm_server`."""

    address: Name


class Backends(NamedTuple):
    """The abilities of the attached engines together. `context_tokens` is the model's context length (None if unknown).
    `reports_ids` is True if any engine reports token ids."""

    context_tokens: int | None
    reports_ids: bool


class Asked(NamedTuple):
    """The parts of a request that are repeated in its reply, and a digest of the request."""

    job_id: str
    instance_id: str
    trajectory_id: int | str
    digest: str


def asked_of(spec: ProcessSpec, job_id: str) -> Asked:
    """Return the parts of a request that are repeated in its reply, and the request's digest. Raises InvalidField if
    the instance has no id."""
    body = spec.model_dump(mode="json", exclude={"job_id": True, "sampling_params": {"api_key"}}, exclude_unset=True)
    digest = hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return Asked(job_id, spec.instance.id, spec.instance.trajectory_id, digest)


class Handler(NamedTuple):
    """A handler from the settings. It makes tasks from instances. `table` is the content of its task file."""

    name: str
    settings: ProrlHandlerConfig
    table: dict[str, Any]

    def task(self, instance: Instance) -> dict[str, Any]:
        """Return the task for an instance. Raises InvalidField with the name of a column that is wrong."""
        row, settings = instance.columns(), self.settings
        if settings.rows is None:
            return with_texts(filled(self.table, row, THE_INSTANCE), THE_INSTANCE)
        given = Additions(image=settings.image, test_command=settings.test_command, own=self.table)
        return whole(example_of(ADAPTERS[settings.rows], row, given, THE_INSTANCE), THE_INSTANCE).task


class Handlers:
    """The handlers from the settings, by data source. Raises InvalidField if a handler is wrong."""

    def __init__(self, config: Config) -> None:
        folder = config.read_from.parent if config.read_from is not None else None
        self._named: dict[str, Handler] = {}
        for name, settings in config.prorl.handlers.items():
            place = f"prorl.handlers.{name}"
            if settings.rows is not None and settings.rows not in ADAPTERS:
                raise InvalidField(
                    f"there is no kind of rows {settings.rows!r}",
                    field=f"{place}.rows",
                    hint=f"the kinds are {', '.join(ADAPTERS)}",
                )
            for each in settings.ignored:
                if each not in REFUSABLE:
                    raise InvalidField(
                        f"{each!r} is not a sampling parameter that can be ignored",
                        field=f"{place}.ignored",
                        hint=f"those are {', '.join(REFUSABLE)}",
                    )
            path = settings.task if folder is None else folder / settings.task
            handler = Handler(name, settings, read_toml_file(path, field=f"{place}.task", what="task file"))
            for source in (name, *settings.data_sources):
                if source in self._named:
                    raise InvalidField(
                        f"the handlers {self._named[source].name!r} and {name!r} both take {source!r}", field=place
                    )
                self._named[source] = handler

    def find(self, data_source: str) -> Handler:
        """Return the handler for a data source: the handler with exactly this name. If there is none, the handlers'
        names that end with `*` are compared with the beginning of the data source, and the longest matching name is
        used. Raises RequestError, which lists the known names."""
        if (found := self._named.get(data_source)) is not None:
            return found
        for source in sorted(self._named, key=len, reverse=True):
            if source.endswith("*") and data_source.startswith(source[:-1]):
                return self._named[source]
        raise RequestError(
            f"no handler takes the data source {data_source!r}: the handlers take {', '.join(self._named) or 'none'}",
            hint="the operator declares handlers in the settings: [prorl.handlers.NAME]",
            field="instance.data_source",
        )


def group_of(spec: ProcessSpec, asked: Asked, handler: Handler, backends: Backends) -> GroupSpec:
    """Return the group that runs a job. Raises InvalidField with the name of the wrong column, parameter or field."""
    task = handler.task(spec.instance)
    parameters = spec.sampling_params
    _check_parameters(parameters, handler, backends)
    sampling = {name: value for name in SAMPLED if (value := getattr(parameters, name)) is not None}
    limits = [each for each in (parameters.max_tokens, parameters.max_output_tokens) if each is not None]
    if limits:
        sampling["max_tokens"] = min(limits)
    if parameters.enable_thinking is not None:
        sampling["thinking"] = parameters.enable_thinking
    task["sampling"] = {**_table(task, "sampling"), **sampling}
    if parameters.max_iterations is not None:
        task["limits"] = {**_table(task, "limits"), "turns": parameters.max_iterations}
    task["labels"] = {**_table(task, "labels"), JOB_LABEL: asked.job_id, REQUEST_LABEL: asked.digest}
    return validate_group({"task": task, "n": 1, "idempotency_key": f"{IDEMPOTENCY_PREFIX}{asked.job_id}"})


def _table(task: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = task.get(name, {})
    if not isinstance(value, Mapping):
        raise InvalidField("must be an object", field=f"task.{name}", hint="correct the handler's task file")
    return value


def _check_parameters(parameters: SamplingParameters, handler: Handler, backends: Backends) -> None:
    for name, refused in AGENTS_OWN.items():
        if getattr(parameters, name) is refused and name not in handler.settings.ignored:
            raise InvalidField(
                f"{str(refused).lower()} changes ProRL's own agent, and handler {handler.name!r} runs the agent of its"
                " task",
                field=f"sampling_params.{name}",
                hint=f"leave the parameter out, or list {name} in `ignored` of the handler",
            )
    length, context = parameters.max_model_len, backends.context_tokens
    if length is not None and "max_model_len" not in handler.settings.ignored and (context or 0) > length:
        raise InvalidField(
            f"{length} is less than the model's context of {context} tokens, and the service has one context for all"
            " sessions",
            field="sampling_params.max_model_len",
            hint="serve with --context, or list max_model_len in `ignored` of the handler",
        )
    ignored = "token_level_generation" in handler.settings.ignored
    if parameters.token_level_generation and not backends.reports_ids and not ignored:
        raise InvalidField(
            "the attached engines report no token ids",
            field="sampling_params.token_level_generation",
            hint="attach vLLM, SGLang or a server with ProRL's token route, or send false",
        )
