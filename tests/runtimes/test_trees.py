"""Trees that are hard to carry: very deep ones, and trees that change while they are archived."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.node_folder import remove_tree
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.guest.filesystem.paths import make_folders
from outrider.sandbox.runtimes.guest.filesystem.tree_writer import FolderCursor, empty_folder
from outrider.sandbox.runtimes.guest.filesystem.trees import Descent, Packer
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox

from .world import World, snapshot

pytestmark = pytest.mark.timeout(180)

DEPTH = 1200
NAME = "d" * 10
"""DEPTH folders of this name make a path that is longer than the kernel accepts."""
MAKE = f"import os\nfor _ in range({DEPTH}):\n os.mkdir('{NAME}')\n os.chdir('{NAME}')\nopen('last', 'w').write('deep')"
LOOK = f"import os\nfor _ in range({DEPTH}):\n os.chdir('{NAME}')\nprint(open('last').read())"


@pytest.fixture(params=["process", "namespace"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def run(sandbox: Runtime, program: str, cwd: str) -> str:
    result = await sandbox.exec(["python3", "-c", program], cwd=cwd, seconds=60)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode()


@pytest.mark.deep
async def test_a_deep_tree_is_carried(world: World, kind: str) -> None:
    agent, fresh = await world.start(kind), await world.start(kind)
    for sandbox in (agent, fresh):
        await sandbox.exec("mkdir t; echo beside > t/e", seconds=30)
    await run(agent, MAKE, "t")
    await run(fresh, MAKE.replace("deep", "old"), "t")
    await agent.snapshot(["t"], world.folder / "archive")
    await fresh.restore(world.folder / "archive", ["t"])
    assert await run(fresh, LOOK, "t") == "deep\n"
    assert await fresh.read("t/e") == b"beside\n"
    for sandbox in (agent, fresh):
        await sandbox.exec("rm -rf t", seconds=60)


@pytest.mark.deep
async def test_a_deep_layer_is_carried(world: World, folder: Path) -> None:
    agent = await world.start("namespace")
    await run(agent, MAKE, "/var/tmp")
    assert isinstance(agent, ToolServerSandbox)
    await agent.save_layer(folder / "layer")
    assert await run(await world.start("namespace", layer=folder / "layer"), LOOK, "/var/tmp") == "deep\n"


@pytest.mark.deep
async def test_a_patch_of_a_deep_path_is_applied(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    path = "a/" * 1500 + "f"
    await sandbox.patch(f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n")
    assert await sandbox.read(path) == b"x\n"
    await sandbox.exec("rm -rf a", seconds=60)


def test_a_deep_folder_of_the_host_is_removed(tmp_path: Path) -> None:
    here = os.open("/", os.O_RDONLY)
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir(NAME, dir_fd=at)
        below = os.open(NAME, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    for fd in (here, at):
        os.close(fd)
    remove_tree(tmp_path / NAME)
    assert os.listdir(tmp_path) == []


@pytest.mark.deep
def test_as_many_folders_as_a_path_has_are_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    make_folders(f"{tmp_path}/" + "a/" * 1900)
    make_folders(f"{tmp_path}/a//b/./c/")
    assert (tmp_path / "a/b/c").is_dir()
    with pytest.raises(NotADirectoryError):
        make_folders(f"{tmp_path}/file/x")
    with pytest.raises(FileNotFoundError):
        make_folders("/proc/none/x")  # the kernel makes no folder there, and says that the path does not exist
    empty_folder(os.open(tmp_path, os.O_RDONLY))


async def test_nothing_runs_while_files_are_carried(world: World, kind: str) -> None:
    agent = await world.start(kind)
    await agent.exec("(setsid sh -c 'while :; do echo x >> grows; done' > /dev/null 2>&1 &)", seconds=20)
    await agent.exec("until test -s grows; do :; done", seconds=20)
    data = await snapshot(agent, world.folder, "grows", alone=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getmember("work/grows").size == len(await agent.read("grows"))


class Disturbed(tarfile.TarFile):
    """An archive that sets the size of a file to `size` just before the file is added."""

    size = 0
    path = Path()

    def addfile(self, tarinfo: tarfile.TarInfo, fileobj: Any = None) -> None:
        if tarinfo.isreg():
            os.truncate(self.path, self.size)
        super().addfile(tarinfo, fileobj)


@pytest.mark.parametrize(("size", "kept"), [(3, b"abc\0\0"), (0, bytes(5)), (9_000_000, b"abcde")])
def test_a_file_that_changes_while_it_is_archived_has_the_size_that_was_announced(
    tmp_path: Path, size: int, kept: bytes
) -> None:
    file = tmp_path / "tree/file"
    file.parent.mkdir()
    file.write_bytes(b"abcde")
    (tmp_path / "tree/next").write_bytes(b"n")
    sink = io.BytesIO()
    with Disturbed.open(fileobj=sink, mode="w|") as archive:
        assert isinstance(archive, Disturbed)
        archive.size, archive.path = size, file
        Packer(archive, lambda *_: None).add_tree(os.open(tmp_path, os.O_RDONLY), "tree", "t")
    sink.seek(0)
    with tarfile.open(fileobj=sink) as found:
        assert found.getnames() == ["t", "t/file", "t/next"]
        assert found.extractfile("t/file").read() == kept
        assert found.extractfile("t/next").read() == b"n"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path), lambda path: None])
def test_a_file_that_becomes_something_else_meanwhile_is_left_out(tmp_path: Path, make: Any) -> None:
    (tmp_path / "a").write_bytes(b"a")
    os.link(tmp_path / "a", tmp_path / "b")
    os.link(tmp_path / "a", tmp_path / "c")

    def swap(member: tarfile.TarInfo, folder: int, name: str) -> None:
        if name == "a":
            os.unlink(tmp_path / name)
            make(tmp_path / name)

    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w|") as archive:
        Packer(archive, swap).add_tree(os.open(tmp_path, os.O_RDONLY), ".", "t")
    sink.seek(0)
    with tarfile.open(fileobj=sink) as found:
        assert [(member.name, member.linkname) for member in found] == [("t", ""), ("t/b", ""), ("t/c", "t/b")]


def test_a_folder_that_is_moved_away_meanwhile_ends_the_walk(tmp_path: Path) -> None:
    (tmp_path / "top/in/ner").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    descent = Descent(os.open(tmp_path / "top", os.O_RDONLY))
    assert descent.down("in")
    assert descent.down("ner")
    os.rename(tmp_path / "top/in/ner", tmp_path / "elsewhere/ner")
    assert not descent.up()
    os.close(descent.fd)


def test_the_way_to_a_folder_is_begun_anew_where_it_has_changed(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    way = FolderCursor(os.open(tmp_path / "top", os.O_RDONLY))
    assert way.to(["a", "b"]) >= 0
    os.rename(tmp_path / "top/a/b", tmp_path / "away")
    os.mkdir("made", dir_fd=way.to(["a", "c"]))
    assert (tmp_path / "top/a/c/made").is_dir()
    (tmp_path / "top/link").symlink_to("a")
    assert way.to(["link"]) == way.to(["link", "c"]) == -1
    for fd in (way.descent.fd, way.top):
        os.close(fd)


@pytest.mark.deep
async def test_more_than_can_be_carried_is_told(world: World) -> None:
    sandbox = await world.start("process")
    await sandbox.exec("truncate -s 3G large", seconds=20)
    with pytest.raises(RuntimeFailure, match="more than 1073741824 bytes"):
        await sandbox.snapshot(["large"], world.folder / "archive")
    assert not (world.folder / "archive").exists()
