"""An image is pulled from a registry onto every machine that runs sessions. Skopeo is replaced by a script."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from outrider.errors import InvalidField
from outrider.nodes import joined
from outrider.sandbox.rootfs.store import ImageStore
from outrider.spec import PullSpec
from support.skopeo import fake_skopeo

from .conftest import Starts
from .test_joined import Machine, known


@pytest.mark.deep
async def test_each_machine_gets_it_once(start: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "host_id", lambda: "another machine")
    pulls = fake_skopeo(tmp_path, monkeypatch)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(start(processes=2))
        near = ImageStore()
        monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "far home"))  # for the processes that start from here on
        await stack.enter_async_context(Machine("far").at(running.url, tmp_path, processes=2))
        await known(running, "local-0", "local-1", "far-0", "far-1")
        pulled = await running.service.pull_image(PullSpec(reference="registry/x", name="tools"))
        assert len(pulled.machines) == 2
        image, far = near.image("tools"), ImageStore().image("tools")
        assert (image.digest, image.bytes) == (far.digest, far.bytes)
        assert {(each.digest, each.bytes, each.error) for each in pulled.machines} == {
            (image.digest, image.bytes, None)
        }
        assert len(pulls()) == 2
        refused = await running.service.pull_image(PullSpec(reference="registry/none", name="other"))
        messages = [each.error.message for each in refused.machines if each.error]
        assert ["no such image" in message for message in messages] == [True, True]
        with pytest.raises(InvalidField):
            await running.service.pull_image(PullSpec(reference="registry/x", name="../x"))


async def test_a_service_that_stops_meanwhile_does_not_wait(
    start: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch, seconds=600)
    async with start(processes=1) as running:
        spec = PullSpec(reference="registry/x", name="tools")
        pulling = asyncio.create_task(running.service.pull_image(spec))
        while not pulls():  # another process writes it
            if pulling.done():  # on a busy machine the node may be lost and come back
                pulling = asyncio.create_task(running.service.pull_image(spec))
            await asyncio.sleep(0.01)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
    assert not ImageStore().names()


@pytest.mark.deep
async def test_a_machine_that_goes_meanwhile_says_so(
    start: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch, seconds=60)
    async with start(processes=0) as running:
        async with Machine("far").at(running.url, tmp_path):
            await known(running, "far")
            pulling = asyncio.create_task(running.service.pull_image(PullSpec(reference="registry/x", name="tools")))
            while not pulls():  # noqa: ASYNC110  # another process writes it
                await asyncio.sleep(0.01)
        [far] = (await pulling).machines
        assert far.error is not None
        assert "far is gone" in far.error.message
