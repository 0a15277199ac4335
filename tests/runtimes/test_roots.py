"""Links and files that images, tasks and agents put where a sandbox's own files are mounted. None of them leads to the
host."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.spec import Mount, RuntimeSpec

from .test_isolation import tiny_root
from .world import World

LOOK = """
for way in /.. /../.. /proc/.. /dev/.. /by /by/.. /data/tests /proc /dev /tmp /run /work /root; do
    { cat ${way}SECRET && echo > ${way}SECRET.written && echo $way; } 2>/dev/null
done
for way in /proc/sys /.. /../sys; do test ! -w $way/kernel/hostname || echo $way; done
true
"""


async def reaches_nothing(sandbox: Runtime, folder: Path) -> None:
    secret = folder / "secret"
    secret.write_text("the host's")
    seen = await sandbox.exec(LOOK.replace("SECRET", str(secret)), cwd="/", seconds=20)
    assert (seen.exit_code, seen.stdout) == (0, b"")


def host_files(folder: Path) -> set[str]:
    """Return all paths below a folder of the host that no sandbox may use."""
    return {str(Path(above, name)) for above, folders, files in os.walk(folder) for name in (*folders, *files)}


@pytest.mark.parametrize("name", ["dev", "proc", "tmp", "work", "usr"])
@pytest.mark.parametrize("aim", ["/", "..", "/proc/1/root"])
async def test_an_image_with_links_in_the_place_of_folders(world: World, folder: Path, name: str, aim: str) -> None:
    root = tiny_root(folder)
    place = root / name
    with contextlib.suppress(OSError):
        place.rmdir()
    if place.exists():
        place.rename(root / "moved")
    place.symlink_to(aim)
    sandbox = world.create("namespace", rootfs=str(root))
    with contextlib.suppress(RuntimeFailure):  # the sandbox may refuse to start
        await sandbox.start()
        await reaches_nothing(sandbox, folder)


@pytest.mark.parametrize("aim", ["/", "..", "/proc/1/cwd"])
async def test_an_image_with_links_on_the_way_to_what_is_shown(world: World, folder: Path, aim: str) -> None:
    root = tiny_root(folder)
    (root / "by").symlink_to(aim)
    shown, elsewhere = folder / "shown", folder / "elsewhere"
    shown.mkdir()
    elsewhere.mkdir()
    for target in ("/by", f"/by{elsewhere}/new", f"/by{elsewhere}"):
        named = [{"source": str(shown), "target": target}]
        sandbox = world.create("namespace", rootfs=str(root), named=named)
        with contextlib.suppress(RuntimeFailure):
            await sandbox.start()
            await reaches_nothing(sandbox, folder)
        assert host_files(elsewhere) == set()


@pytest.mark.parametrize("aim", ["/", ".."])
@pytest.mark.parametrize("target", ["/data/tests", "/data"])
async def test_a_layer_with_links_on_the_way_to_what_is_shown(
    world: World, folder: Path, aim: str, target: str
) -> None:
    shown, elsewhere = folder / "shown", folder / "elsewhere"
    shown.mkdir()
    elsewhere.mkdir()
    named = [{"source": str(shown), "target": f"{target}{elsewhere}/hidden"}]
    agents = await world.start("namespace", named=named)
    assert isinstance(agents, ToolServerSandbox)
    swap = f"mv /data /data2; mkdir -p $(dirname {target}); ln -s {aim} {target}"
    assert (await agents.exec(swap, seconds=10)).exit_code == 0
    await agents.save_layer(folder / "layer.tar")
    graders = world.create("namespace", layer=folder / "layer.tar", named=named)
    with contextlib.suppress(RuntimeFailure):
        await graders.start()
        await reaches_nothing(graders, folder)
    assert host_files(elsewhere) == set()


@pytest.mark.parametrize("part", ["allowed", "allowed/deep", "allowed/deep/file"])
async def test_a_link_that_is_put_into_the_path_of_a_mount_after_its_check_is_not_followed(
    world: World, folder: Path, part: str
) -> None:
    for name in ("allowed", "secret"):
        (folder / name / "deep").mkdir(parents=True)
        (folder / name / "deep/file").write_text(name)
    named = [{"source": str(folder / "allowed/deep/file"), "target": "/seen"}]
    before = await world.start("namespace", named=named)
    assert await before.read("/seen") == b"allowed"
    sandbox = world.create("namespace", named=named)
    (folder / part).rename(folder / "before")
    (folder / part).symlink_to(folder / part.replace("allowed", "secret"))
    with pytest.raises(RuntimeFailure) as failure:
        await sandbox.start()
    said = f"{failure.value.message} {failure.value.log_tail}"
    assert "symbolic link" in said or "Not a directory" in said, said


async def test_a_link_in_the_place_of_a_root_folder_is_not_followed(world: World, folder: Path) -> None:
    root = tiny_root(folder)
    sandbox = world.create("namespace", rootfs=str(root))
    root.rename(folder / "elsewhere")
    root.symlink_to(folder / "elsewhere")
    with pytest.raises(RuntimeFailure) as failure:
        await sandbox.start()
    said = f"{failure.value.message} {failure.value.log_tail}"
    assert "symbolic link" in said or "Not a directory" in said, said


async def test_a_pipe_in_the_place_of_a_shown_file_holds_nothing_up(world: World, folder: Path) -> None:
    root = tiny_root(folder)
    os.mkfifo(root / "hidden")
    (folder / "file").write_text("shown")
    sandbox = await world.start(
        "namespace", rootfs=str(root), named=[{"source": str(folder / "file"), "target": "/hidden"}]
    )
    assert await sandbox.read("/hidden") == b"shown"


@pytest.mark.parametrize("target", ["/", "//", "/.", "/a/..", "/a/../..", "///", "/data/", "/data//x", "/a/./b"])
def test_targets_are_plain_paths_below_the_root(target: str) -> None:
    with pytest.raises(ValidationError, match="target"):
        RuntimeSpec(mounts=[Mount(source="/srv", target=target)])
