"""The documentation's tables of fields, names and codes match the code: they have every entry, no other entry, and the
same defaults.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterable
from enum import StrEnum
from pathlib import PurePath
from typing import Any, get_args, get_origin

import msgspec
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from outrider.api.server import ROLES, ROUTERS
from outrider.cli.command_line import CliGroup
from outrider.cli.commands import commands
from outrider.config import OWN, FrozenConfig, GraderConfig, all_settings
from outrider.engines.relay.attached_worker import RelayOptions
from outrider.engines.relay.messages import ToService, ToWorker
from outrider.errors import ErrorRecord, OutriderError
from outrider.evaluators.base import Outcome
from outrider.evaluators.checks.reasoning_sets import EVALUATED, UNUSABLE
from outrider.evaluators.code.cases import CodeOptions
from outrider.evaluators.harbor import HarborOptions
from outrider.evaluators.http import HttpOptions
from outrider.evaluators.judge.questions import JudgeOptions
from outrider.evaluators.maths import MathOptions
from outrider.evaluators.nested import AllOptions, WeightedOptions
from outrider.evaluators.reasoning import ReasoningOptions
from outrider.harnesses.endpoint_variables import ENDPOINT_VARIABLES
from outrider.harnesses.presets import load_preset, preset_names
from outrider.harnesses.tool_agent import ToolOptions
from outrider.lab.fakes.scripted_engine import ScriptedReply, ScriptOptions
from outrider.lifecycle import SessionState, StopReason
from outrider.plugins import names
from outrider.sessions.calls.limits import LimitReached
from outrider.sessions.conversation import RunEnded
from outrider.spec import EngineSpec, GroupSpec
from outrider.store.rows import EventKind
from outrider.tasks.harbor.fields import FIELD_USES
from outrider.tokens.rendering.renderer import MARKUP
from outrider.tokens.samples import POLICY
from outrider.trajectory import BranchKind, ForkCause, JoinKind, JsonSample, LogprobKind, SampleImage, TokenMode
from outrider.wire.link_protocol import Close

from .pages import ROOT, Table, code, page

SETTINGS = runpy.run_path(str(ROOT / "scripts" / "settings_table.py"))
CHART = ROOT / "deploy" / "helm" / "outrider"

REQUIRED = "required"


def default(value: Any) -> Any:
    """Return a default as its JSON value."""
    match value:
        case PurePath():
            return str(value)
        case tuple():
            return list(value)
        case msgspec.UNSET:  # the field is left out
            return None
        case _:
            return value


def fields_of(model: type[BaseModel], above: str = "", *, lists: bool = True) -> dict[str, Any]:
    """Return every leaf of a model by its dotted path, with its default; `[]` stands for the elements of a list."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        path = f"{above}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= fields_of(field.annotation, f"{path}.", lists=lists)
            continue
        found[path] = REQUIRED if field.is_required() else default(field.get_default(call_default_factory=True))
        for inner, within in models_in(field.annotation) if lists else ():
            found |= fields_of(inner, f"{path}{within}.", lists=lists)
    return found


def models_in(annotation: Any, within: str = "") -> list[tuple[type[BaseModel], str]]:
    """Return the models that a field may have, each with `[]` if it is in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, within)]
    within = "[]" if get_origin(annotation) in (list, tuple) else within
    return [model for inner in get_args(annotation) for model in models_in(inner, within)]


def struct_fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.default is not msgspec.NODEFAULT:
            found[field.name] = default(field.default)
        elif field.default_factory is not msgspec.NODEFAULT:
            found[field.name] = default(field.default_factory())
        else:
            found[field.name] = REQUIRED
    return found


def written(table: Table) -> dict[str, Any]:
    """Return the table's fields with the defaults in the table."""
    words = {"required": REQUIRED, "none": None}
    defaults = [words[cell] if cell in words else json.loads(code(cell)) for cell in table.column("Default")]
    return dict(zip(listed(table), defaults, strict=True))


def listed(table: Table) -> list[str]:
    """Return the first column, whose cells are code."""
    return [code(row[0]) for row in table.rows]


def values(kind: Iterable[StrEnum]) -> set[str]:
    return {item.value for item in kind}


def test_datasets_says_what_becomes_of_each_field_of_a_harbor_task() -> None:
    [table] = page("docs/datasets.md").tables("Field of `task.toml`")
    rows = [(", ".join(f"`{field}`" for field in row.fields), str(row.use), row.how) for row in FIELD_USES]
    assert list(table.rows) == rows


def test_tasks_has_every_field_with_its_default() -> None:
    (table,) = page("docs/tasks.md").tables("Field")
    fields = fields_of(GroupSpec)
    # docs/tasks.md states that these fields of a later step equal the task's own fields, and that these fields of a
    # grader's runtime equal those of the agent's runtime.
    same = ("task.evaluator.runtime.", "task.then[].evaluator.", "task.then[].prepare[].", "task.then[].collect[].")
    assert written(table) == {name: value for name, value in fields.items() if not name.startswith(same)}


def test_relay_has_every_option_and_close_code() -> None:
    (options,) = page("docs/relay.md").tables("Option")
    assert written(options) == struct_fields(RelayOptions)
    (codes,) = page("docs/relay.md").tables("Close code")
    assert {int(code(row[0])) for row in codes.rows} == set(Close)


def test_relay_has_every_message_with_its_fields() -> None:
    tables = page("docs/relay.md").tables("Message")
    shown = {code(row[0]): row[1].replace("`", "").split(", ") for table in tables for row in table.rows}
    messages = {kind for union in (ToService, ToWorker) for kind in get_args(union)}
    assert shown == {
        kind.__struct_config__.tag: [field.name for field in msgspec.structs.fields(kind)] or ["none"]
        for kind in messages
    }


def test_config_and_the_chart_have_every_setting() -> None:
    for path, make in ((ROOT / "docs/config.md", "with_table"), (CHART / "values.schema.json", "with_settings")):
        text = path.read_text()
        assert text == SETTINGS[make](text), "run: python scripts/settings_table.py"


def test_serve_and_join_have_an_option_for_each_setting_that_is_theirs() -> None:
    nodes = commands().member("nodes")
    assert isinstance(nodes, CliGroup)
    options = {setting.option.split()[0]: path for path, _, setting in all_settings() if setting.option}
    of_serve, of_join = (
        {option for parameter in command.params for option in parameter.opts}
        for command in (commands().member("serve"), nodes.member("join"))
    )
    assert options.keys() <= of_serve
    own = {option for option, path in options.items() if path.partition(".")[0] in OWN}
    assert options.keys() & of_join - {"--token"} == own - {"--data"}


def test_config_has_every_streamed_family() -> None:
    missing = MARKUP.keys() - set(page("docs/config.md").spans)
    assert not missing


def test_engines_has_every_field_and_kind() -> None:
    spec, script, reply = page("docs/engines.md").tables("Field")
    assert written(spec) == fields_of(EngineSpec)
    assert written(script) == struct_fields(ScriptOptions)
    assert written(reply) == struct_fields(ScriptedReply)
    (kinds,) = page("docs/engines.md").tables("Kind")
    routers = ["vllm-router", "sglang-router"]
    assert listed(kinds) == [
        "vllm",
        "sglang",
        "openai",
        "embedded",
        "relay",
        "verl-workers",
        "prorl",
        *routers,
        "scripted",
    ]
    assert set(listed(kinds)) == set(names("engine"))


def test_frozen_models_has_every_field() -> None:
    (table,) = page("docs/frozen-models.md").tables("Field")
    fields = fields_of(FrozenConfig, lists=False)
    assert written(table) == fields


def test_runtimes_has_every_kind() -> None:
    (kinds,) = page("docs/runtimes.md").tables("Kind")
    assert set(listed(kinds)) == set(names("runtime"))


def test_tokens_has_every_column_of_a_sample() -> None:
    (table,) = page("docs/tokens.md").tables("Column")
    assert sorted(listed(table)) == sorted(struct_fields(JsonSample))


def test_tokens_has_every_field_of_an_image() -> None:
    (table,) = page("docs/tokens.md").tables("Field")
    assert listed(table) == list(struct_fields(SampleImage))


def test_tokens_has_every_join_cause_and_branch() -> None:
    tokens = page("docs/tokens.md")
    (joins,), (causes,), (branches,) = tokens.tables("Join"), tokens.tables("Cause"), tokens.tables("Branch kind")
    assert set(listed(joins)) == values(JoinKind)
    assert set(listed(causes)) == values(ForkCause)
    assert dict(zip(listed(branches), branches.column("Policy"), strict=True)) == {
        kind.value: POLICY[kind].value for kind in BranchKind
    }
    assert set(tokens.spans) >= values(LogprobKind) | values(TokenMode)


def test_tasks_names_every_stop_reason() -> None:
    (table,) = page("docs/tasks.md").tables("What ends")
    assert set(map(code, table.column("Stop reason"))) == values(StopReason)


def every_error(kind: type[OutriderError] = OutriderError) -> list[type[OutriderError]]:
    return [found for child in kind.__subclasses__() for found in (child, *every_error(child))]


def test_failure_has_every_error_with_its_status() -> None:
    errors = {error.code: error for error in every_error() if error.__module__.startswith("outrider.")}
    assert {LimitReached.code, RunEnded.code} < errors.keys()
    fields, codes = *page("docs/failure.md").tables("Field"), *page("docs/failure.md").tables("Code")
    assert written(fields) == struct_fields(ErrorRecord)
    assert {code(row[0]): row[1:4] for row in codes.rows} == {
        name: (error.boundary.value, str(error.http_status), "yes" if error.retryable else "no")
        for name, error in errors.items()
    }


def test_api_has_every_route() -> None:
    app = FastAPI(docs_url=None, redoc_url=None)
    for router in ROUTERS:
        app.include_router(router.routes)
    control = {f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods}
    (table,) = page("docs/api.md").tables("Route")
    assert set(listed(table)) == control | {"GET /healthz", "GET /readyz", "GET /openapi.json"}
    roles = {route.replace(":any_path", ""): role for route, role in ROLES.items() if not route.startswith("WEBSOCKET")}
    assert {
        route: role for route, role in zip(listed(table), table.column("Role"), strict=True) if role != "none"
    } == roles


def test_api_has_every_event_and_state() -> None:
    (events,) = page("docs/api.md").tables("Event")
    assert set(listed(events)) == values(EventKind)
    assert set(page("docs/api.md").spans) >= values(SessionState)


def test_harnesses_has_every_preset_and_variable() -> None:
    harnesses = page("docs/harnesses.md")
    assert set(harnesses.spans) >= ENDPOINT_VARIABLES
    for name in preset_names():
        assert f'preset = "{name}"' in harnesses.spans
        assert f"harnesses/{name}.md" in harnesses.links


@pytest.mark.parametrize("name", preset_names())
def test_a_presets_page_has_its_options(name: str) -> None:
    expected = {
        option: REQUIRED if given.default is None else given.default
        for option, given in load_preset(name).options.items()
        if not given.optional  # optional options are in the part of the page that scripts/harness_pages.py writes
    }
    tables = page(f"docs/harnesses/{name}.md").tables("Option")
    assert [written(table) for table in tables] == ([expected] if expected else [])


def test_the_built_in_agents_page_has_its_options() -> None:
    (table,) = page("docs/harnesses/inprocess.md").tables("Option")
    assert written(table) == fields_of(ToolOptions)


def test_evaluators_has_every_kind() -> None:
    (table,) = page("docs/evaluators.md").tables("Kind")
    listed_kinds = {kind for cell in table.column("Kind") for kind in re.findall(r"`([^`]+)`", cell)}
    assert listed_kinds - {"package.module:Class"} == set(names("evaluator"))
    (fields,) = page("docs/tasks.md").tables("Field")
    [row] = [row for row in fields.rows if code(row[0]) == "task.evaluator.kind"]
    assert set(re.findall(r"`([^`]+)`", row[2])) == listed_kinds


def test_each_evaluators_page_has_its_options() -> None:
    kinds: dict[str, type[BaseModel]] = {
        "math": MathOptions,
        "reasoning-gym": ReasoningOptions,
        "code": CodeOptions,
        "judge": JudgeOptions,
        "http": HttpOptions,
        "harbor": HarborOptions,
    }
    for kind, options in kinds.items():
        (table,) = page(f"docs/evaluators/{kind}.md").tables("Option")
        assert written(table) == fields_of(options), kind
    (table,) = page("docs/evaluators/combined.md").tables("Option")
    assert written(table) == fields_of(WeightedOptions) | fields_of(AllOptions)


def test_the_reasoning_gym_page_has_its_data_sets() -> None:
    evaluated, refused = page("docs/evaluators/reasoning-gym.md").tables("Data set")
    for listed_sets, known in ((evaluated, EVALUATED), (refused, UNUSABLE)):
        assert {name for cell in listed_sets.column("Data set") for name in re.findall(r"`([^`]+)`", cell)} == set(
            known
        )


def test_the_graders_page_has_their_fields() -> None:
    (table,) = page("docs/evaluators/http.md").tables("Field")
    assert written(table) == fields_of(GraderConfig, lists=False)


def test_evaluators_has_everything_of_an_outcome() -> None:
    (table,) = page("docs/evaluators.md").tables("Attribute")
    assert listed(table) == list(struct_fields(Outcome))
