"""Namespace sandboxes on a machine with file systems mounted below /usr.

test_below_usr.py runs these tests in mount namespaces that below_usr.py makes.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from outrider.errors import RuntimeUnavailable
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.kernel.mounts import MountTable

from .below_usr import BELOW, FORM
from .world import World

HERE = os.environ.get(FORM, "")


@pytest.fixture
async def sandbox(world: World) -> Runtime:
    return await world.start("namespace")


async def out(sandbox: Runtime, command: str) -> str:
    ran = await sandbox.exec(command, seconds=30, merged=True)
    return ran.stdout.decode()


async def test_what_is_mounted_is_seen(sandbox: Runtime) -> None:
    for path, text in {"driver/lib": "driver", "driver/deeper/lib": "deeper", "with blank/lib": "blank"}.items():
        assert await out(sandbox, f"cat '{BELOW}/{path}'") == text
    assert await out(sandbox, f"cat {BELOW}/twice/lib; {BELOW}/tool") == "twicetool\n"


async def test_it_is_read_only_and_gives_no_privileges(sandbox: Runtime) -> None:
    for place in ("driver", "driver/deeper", "with blank", "twice"):
        assert "Read-only" in await out(sandbox, f"touch '{BELOW}/{place}/new'"), place
    assert "Read-only" in await out(sandbox, f"echo x > {BELOW}/tool")
    assert "denied" in await out(sandbox, f"head -c1 {BELOW}/driver/zero")
    flags = await out(sandbox, f"grep '{BELOW}/driver ' /proc/self/mountinfo")
    assert {"ro", "nosuid", "nodev"} <= set(flags.split()[5].split(","))


async def test_nothing_that_is_hidden_comes_to_light(sandbox: Runtime) -> None:
    assert "hidden" not in await out(sandbox, f"cat {BELOW}/*/hidden {BELOW}/tool {BELOW}/socket 2>/dev/null")
    await out(sandbox, f"umount {BELOW}/driver; umount -l {BELOW}/driver")
    assert await out(sandbox, f"cat {BELOW}/driver/lib") == "driver"


async def test_kernel_file_systems_and_sockets_are_covered(sandbox: Runtime) -> None:
    for place in ("proc", "sys", "auto", "driver/proc"):
        assert await out(sandbox, f"ls {BELOW}/{place}") == "", place
    assert await out(sandbox, f"test -S {BELOW}/socket || echo covered") == "covered\n"
    # The server of this file system never answers, but the kernel refuses root without a call to the server.
    await out(sandbox, f"ls {BELOW}/silent")


async def test_usr_is_writable_where_it_can_be(sandbox: Runtime) -> None:
    told = await out(sandbox, f"touch /usr/new {BELOW}/new && rm /usr/bin/env && ls /usr/new")
    assert told == "/usr/new\n" if HERE == "plain" else "Read-only" in told
    assert not os.access("/usr/new", os.F_OK)
    assert os.access("/usr/bin/env", os.F_OK)


async def test_a_layer_is_carried_on(world: World, tmp_path: Path) -> None:
    one = await world.start("namespace")
    await out(one, f"echo mine > /root/mine; touch {BELOW}/new; rm -r {BELOW}/driver {BELOW}/tool")
    await one.save_layer(tmp_path / "layer")  # type: ignore[attr-defined]  # namespace sandboxes save layers
    other = await world.start("namespace", layer=tmp_path / "layer")
    assert await out(other, f"cat /root/mine {BELOW}/driver/lib") == "mine\ndriver"
    assert (await out(other, f"ls {BELOW}/new")).startswith(f"{BELOW}/new" if HERE == "plain" else "ls: ")


async def test_a_root_of_ones_own_must_not_have_any(world: World) -> None:
    with pytest.raises(RuntimeUnavailable, match=rf"a file system is mounted in rootfs /usr: {BELOW}/") as refused:
        await world.start("namespace", rootfs="/usr")
    assert "unmount it" in (refused.value.hint or "")


async def test_many_begin_and_end_and_leave_nothing(world: World) -> None:
    table = MountTable()
    before = table.mounts()
    sandboxes = [world.create("namespace") for _ in range(8)]
    await asyncio.gather(*(one.start() for one in sandboxes))
    assert {await out(one, f"cat {BELOW}/driver/lib") for one in sandboxes} == {"driver"}
    await asyncio.gather(*(one.stop() for one in sandboxes))
    assert table.mounts() == before
    table.close()
