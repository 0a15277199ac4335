"""Images that are pulled when a session first needs them. A script stands in for Skopeo."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.concurrency.chores import Chores, Failures
from outrider.config import SandboxesConfig
from outrider.errors import Boundary, InvalidField, RuntimeFailure
from outrider.lifecycle import SessionState, StopReason
from outrider.sandbox.rootfs.store import ImageStore
from outrider.sandbox.rootfs.wanted import ImagePulls
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.spec import RuntimeSpec
from support.skopeo import fake_skopeo

from .conftest import MakeWorld
from .stage import StagedRuntime
from .world import group, result_of

ALLOWED = SandboxesConfig(pull=("registry/x", "registry/none"))


class Rooted(StagedRuntime):
    """A staged sandbox that needs an image of the image store, as `namespace` does."""

    uses_image_store = True

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        if spec.image is not None:
            ImageStore().image(spec.image)

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> Any:
        cls.check_spec(spec)
        return super().create(spec, context)


def task(image: str = "registry/x", **fields: Any) -> dict[str, Any]:
    return {"runtime": {"kind": f"{__name__}:{Rooted.__name__}", "image": image}, **fields}


async def test_many_sessions_want_an_image_and_one_pull_gets_it(
    world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch, seconds=0.3)
    async with world(sandboxes=ALLOWED) as w:
        done = await w.done((await w.submit("ask", n=8, **task())).id)
        assert [result_of(session).error for session in done.sessions] == [None] * 8
        assert pulls() == ["docker://registry/x"]
        assert ImageStore().image("registry/x").workdir == "/srv"
        again = result_of(await w.run("ask", **task()))
        assert (again.stop_reason, len(pulls())) == (StopReason.COMPLETED, 1)
        w.assert_quiet()


async def test_the_clocks_and_the_resources_of_a_session_are_untouched_by_the_pull(
    world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch, seconds=1.5)
    limits = {"session_seconds": 1.2, "prepare_seconds": 1.0, "agent_seconds": 1.0}
    async with world(sandboxes=ALLOWED) as w:
        submitted = await w.submit("ask", limits=limits, **task())
        while not pulls():  # noqa: ASYNC110  # another process writes the record
            await asyncio.sleep(0.01)
        assert [(lane.in_use, lane.waiting) for lane in w.lanes()] == [(0, 0)] * 5
        assert w.node.stats().resources.memory_mb_set_aside == 0
        result = result_of((await w.done(submitted.id)).sessions[0])
        assert (result.error, result.stop_reason) == (None, StopReason.COMPLETED)
        assert result.seconds.queued > 1.4
        w.assert_quiet()


async def test_a_failed_pull_is_an_error_with_the_registrys_words_and_is_tried_again(
    world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch)
    async with world(sandboxes=ALLOWED) as w:
        result = result_of(await w.run("ask", max_attempts=2, **task("registry/none")))
        assert (result.stop_reason, result.verdict) == (StopReason.ERROR, None)
        assert result.error is not None
        assert (result.error.boundary, result.error.field) == (Boundary.RUNTIME, "task.runtime.image")
        assert "registry/none cannot be pulled" in result.error.message
        assert "no such image" in result.error.message
        assert len(pulls()) == 2
        w.assert_quiet()


async def test_a_cancelled_session_leaves_the_pull_to_others(
    world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch, seconds=0.5)
    async with world(sandboxes=ALLOWED) as w:
        first, second = [await w.submit("ask", **task()) for _ in range(2)]
        while not pulls():  # noqa: ASYNC110  # another process writes the record
            await asyncio.sleep(0.01)
        await w.service.cancel(first.id)
        assert result_of((await w.done(first.id)).sessions[0]).stop_reason is StopReason.CANCELLED
        assert result_of((await w.done(second.id)).sessions[0]).error is None
        assert len(pulls()) == 1


async def test_a_service_that_ends_meanwhile_kills_the_pull(
    world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch, seconds=600)
    async with world(sandboxes=ALLOWED) as w:
        submitted = await w.submit("ask", **task())
        while not pulls():  # noqa: ASYNC110  # another process writes the record
            await asyncio.sleep(0.01)
        assert (await w.service.reader.session(submitted.sessions[0].id)).state is not SessionState.DONE
    assert not ImageStore().names()


@pytest.mark.parametrize(
    ("image", "sandboxes"),
    [
        ("registry/x", SandboxesConfig()),
        ("registry/x", SandboxesConfig(pull=("other",))),
        ("registry/xyz", ALLOWED),
        ("registry/X..", SandboxesConfig(pull=("registry/X..",))),
        ("registry/x", SandboxesConfig(pull=("registry/x",), images=("mine",))),
    ],
)
async def test_other_images_are_refused_as_before(
    world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, sandboxes: SandboxesConfig
) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch)
    async with world(sandboxes=sandboxes) as w:
        with pytest.raises(Exception, match="image") as caught:
            await w.service.submit(group("ask", **task(image)))
        assert isinstance(caught.value, InvalidField) or "no image" in str(caught.value)
        assert not pulls()


async def test_a_pull_that_fails_with_any_error_is_a_failure_of_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the session would go on without the image, and end as if the image had never been wanted."""

    async def fails(*_: object, **__: object) -> None:
        raise ValueError("odd")

    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("outrider.sandbox.rootfs.wanted.pull", fails)
    async with Chores(Failures()) as background:
        pulls = ImagePulls(["registry/"], background, tmp_path)
        with pytest.raises(RuntimeFailure, match="registry/x cannot be pulled: ValueError: odd"):
            await pulls.want(RuntimeSpec(kind="namespace", image="registry/x"), field="task.runtime")
