"""The harness that is made for a task's spec, and the field that a refusal names."""

from typing import Any

import pytest

from outrider.errors import InvalidField
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.harnesses.command import CommandHarness
from outrider.harnesses.endpoint_variables import ENDPOINT_VARIABLES
from outrider.harnesses.factory import make_harness
from outrider.harnesses.inprocess import InProcessHarness
from outrider.spec import HarnessSpec


class Careful:
    def __init__(self, options: Any) -> None:
        if options:
            raise ValueError("I take none")

    async def init(self, context: HarnessContext) -> None: ...

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        return HarnessOutcome()


class NoHooks:
    def __init__(self, options: Any) -> None: ...


def test_each_kind_is_made() -> None:
    assert isinstance(make_harness(HarnessSpec(preset="pi")), CommandHarness)
    assert isinstance(make_harness(HarnessSpec(command=["true"], env={"A": "b"})), CommandHarness)
    assert isinstance(make_harness(HarnessSpec(agent="tools", options={"max_turns": 2})), InProcessHarness)
    assert isinstance(make_harness(HarnessSpec(agent=f"{__name__}:Careful")), InProcessHarness)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"preset": "nosuch"}, "preset"),
        ({"preset": "shell"}, "options.script"),
        ({"preset": "pi", "options": {"x": 1}}, "options.x"),
        ({"command": ["echo", "a\0b"]}, "command.1"),
        ({"command": [""]}, "command.0"),
        ({"command": ["true"], "env": {"A": "a\0b"}}, "env.A"),
        ({"command": ["echo", "{option.a}"]}, "options.a"),
        ({"command": ["echo", "{option.a}"], "options": {"a": [1]}}, "options.a"),
        ({"command": ["true"], "options": {"a": "unused"}}, "options.a"),
        ({"agent": "nosuch"}, "agent"),
        ({"agent": "no.such.module:Agent"}, "agent"),
        ({"agent": f"{__name__}:NoHooks"}, "agent"),
        ({"agent": "json:dumps"}, "agent"),
        ({"agent": "tools", "env": {"A": "b"}}, "env"),
        ({"agent": "tools", "options": {"max_turns": 0}}, "options.max_turns"),
        ({"agent": "tools", "options": {"tools": ["bash", "perl"]}}, "options.tools.1"),
        ({"agent": "tools", "options": {"tools": ["bash", "bash"]}}, "options.tools"),
        ({"agent": "tools", "options": {"turns": 3}}, "options.turns"),
        ({"agent": f"{__name__}:Careful", "options": {"a": 1}}, "options"),
    ],
)
def test_what_is_wrong_is_named(spec: Any, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        make_harness(HarnessSpec(**spec))
    assert caught.value.field == f"task.harness.{field}"


def test_a_wrong_option_of_an_agent_is_told_in_the_agents_own_words() -> None:
    with pytest.raises(InvalidField) as caught:
        make_harness(HarnessSpec(agent="tools", options={"tools": ["bash", "bash"]}))
    assert caught.value.message == "must not name a tool twice"


@pytest.mark.parametrize("name", sorted(ENDPOINT_VARIABLES))
def test_a_task_cannot_point_the_program_elsewhere(name: str) -> None:
    with pytest.raises(InvalidField) as caught:
        make_harness(HarnessSpec(command=["true"], env={name: "http://elsewhere"}))
    assert caught.value.field == f"task.harness.env.{name}"
