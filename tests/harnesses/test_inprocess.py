"""The harness for agents that run in this process: `init`, `run`, and agents that fail."""

from typing import Any

import pytest

from outrider.errors import HarnessError, InvalidField
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.harnesses.factory import make_harness
from outrider.sandbox.runtimes.base import Runtime
from outrider.spec import HarnessSpec

from .conftest import context, says


class Prepared:
    """Writes a file in `init`, and calls the model once in `run`."""

    def __init__(self, options: Any) -> None:
        self.name = options["name"]

    async def init(self, given: HarnessContext) -> None:
        await given.runtime.write(self.name, given.task.instruction.encode())

    async def run(self, given: HarnessContext) -> HarnessOutcome:
        reply = await given.model.chat([])
        return HarnessOutcome(answer=reply.content)


class Forgetful(Prepared):
    async def run(self, given: HarnessContext) -> HarnessOutcome:
        return None  # type: ignore[return-value]  # the mistake under test


class Clumsy(Prepared):
    async def init(self, given: HarnessContext) -> None:
        raise ZeroDivisionError("oops")


def spec(agent: type) -> HarnessSpec:
    return HarnessSpec(agent=f"{__name__}:{agent.__name__}", options={"name": "note.txt"})


async def test_init_prepares_and_run_drives(sandbox: Runtime) -> None:
    harness, given = make_harness(spec(Prepared)), context(sandbox, spec(Prepared), says("yes"))
    await harness.install(given)
    assert await sandbox.read("note.txt") == b"do it"
    assert (await harness.run(given)).answer == "yes"
    assert harness.available().ok
    assert harness.mounts() == ()


async def test_an_agent_that_returns_nothing_has_failed(sandbox: Runtime) -> None:
    with pytest.raises(HarnessError, match="returned NoneType"):
        await make_harness(spec(Forgetful)).run(context(sandbox, spec(Forgetful)))


async def test_an_init_that_fails_is_the_harness_failing(sandbox: Runtime) -> None:
    with pytest.raises(HarnessError, match=r"Clumsy\.init raised ZeroDivisionError: oops") as caught:
        await make_harness(spec(Clumsy)).install(context(sandbox, spec(Clumsy)))
    assert "ZeroDivisionError: oops" in (caught.value.log_tail or "")


def test_options_that_the_constructor_cannot_take_are_refused_at_submission() -> None:
    with pytest.raises(InvalidField, match="KeyError: 'name'") as caught:
        make_harness(HarnessSpec(agent=f"{__name__}:Prepared"))
    assert caught.value.field == "task.harness.options"
