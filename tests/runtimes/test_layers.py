"""The writable layer of a namespace sandbox, carried as a whole into another sandbox."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.spec import Resources

from .test_isolation import tiny_root
from .world import World

MAKE = """
set -e
mkdir -p /work/deep/er && echo one > /work/deep/er/file
ln -s deep/er/file /work/link && ln /work/deep/er/file /work/hard
chmod 700 /work/deep && printf '#!/bin/sh\\necho ran\\n' > /work/run && chmod +x /work/run && mkfifo /work/pipe
echo 'new: 10.0.0.1' >> /etc/hosts && rm /etc/protocols && rm -r /var/tmp && mkdir /var/tmp
"""
LOOK = """
cat /work/link /work/hard; stat -c %a /work/deep; /work/run; test -p /work/pipe; tail -n 1 /etc/hosts; ls /etc/protocols
stat -c %h /work/hard; ls -A /var/tmp
"""


async def saved(target: Path, sandbox: object) -> Path:
    assert isinstance(sandbox, ToolServerSandbox)
    await sandbox.save_layer(target)
    await sandbox.stop()
    return target


async def test_all_that_was_changed_is_there_again(world: World, folder: Path) -> None:
    first = await world.start("namespace")
    made = await first.exec(MAKE, seconds=20)
    assert (made.exit_code, made.stderr) == (0, b"")
    second = await world.start("namespace", layer=await saved(folder / "layer.tar", first))
    result = await second.exec(LOOK, seconds=20)
    assert result.stdout.decode().split("\n") == ["one", "one", "700", "ran", "new: 10.0.0.1", "2", ""]
    assert b"/etc/protocols" in result.stderr


async def test_what_an_image_lost_stays_lost(world: World, folder: Path) -> None:
    root = tiny_root(folder)
    (root / "opt/old").mkdir(parents=True)
    (root / "opt/old/file").touch()
    first = await world.start("namespace", rootfs=str(root))
    await first.write("/opt/new", b"n")
    taken = "import shutil, os; shutil.rmtree('/opt/old'); os.mkdir('/opt/old'); os.unlink('/etc/release')"
    assert (await (await first.open_shell("python")).run(taken, seconds=20)).exit_code == 0
    second = await world.start("namespace", rootfs=str(root), layer=await saved(folder / "layer.tar", first))
    assert await second.glob("/opt/**/*") == ["/opt/new", "/opt/old"]
    with pytest.raises(FileNotFoundError):
        await second.read("/etc/release")
    assert (root / "opt/old/file").exists()


async def test_nothing_runs_while_it_is_saved(world: World, folder: Path) -> None:
    first = await world.start("namespace")
    await first.exec("(setsid sh -c 'while :; do echo x >> /work/grows; done' &)", seconds=20)
    await first.exec("until test -s /work/grows; do :; done", seconds=20)
    assert isinstance(first, ToolServerSandbox)
    await first.save_layer(folder / "one.tar")
    size = len(await first.read("/work/grows"))
    assert size == len(await first.read("/work/grows"))
    with pytest.raises(FileExistsError):
        await first.save_layer(folder / "one.tar")


async def test_an_archive_reaches_nothing_but_its_layer(world: World, folder: Path) -> None:
    """The author of an archive is not trusted: links and names that lead out end below the sandbox's own root."""
    outside = folder / "outside"
    outside.mkdir()
    with tarfile.open(folder / "layer.tar", "w") as archive:
        for name, kind, aim in (
            ("0/.", tarfile.DIRTYPE, ""),
            ("0/work", tarfile.DIRTYPE, ""),
            ("0/work/out", tarfile.SYMTYPE, str(outside)),
            ("0/work/out/evil", tarfile.REGTYPE, ""),
            ("0/../../../../../evil", tarfile.REGTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, aim, 0o755
            member.size = 4 if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(b"evil"))
    sandbox = world.create("namespace", layer=folder / "layer.tar")
    try:
        await sandbox.start()
    except RuntimeFailure as error:
        assert "cannot be restored" in (error.log_tail or "")  # noqa: PT017  # the start may also succeed
    assert os.listdir(outside) == []
    assert "evil" not in os.listdir("/")


async def test_a_broken_archive_is_told(world: World, folder: Path) -> None:
    (folder / "layer.tar").write_bytes(b"no archive at all")
    with pytest.raises(RuntimeFailure) as raised:
        await world.start("namespace", layer=folder / "layer.tar")
    assert "cannot be restored" in (raised.value.log_tail or "")


async def test_a_layer_larger_than_the_disk_is_refused(world: World, folder: Path) -> None:
    first = await world.start("namespace")
    assert (await first.exec("head -c 8000000 /dev/zero > /work/large", seconds=20)).exit_code == 0
    layer = await saved(folder / "layer.tar", first)
    with pytest.raises(RuntimeFailure):
        await world.start("namespace", layer=layer, resources=Resources(disk_mb=4))
