"""`outrider image`, and tasks that name an image."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import threading
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.errors import InvalidField
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.rootfs.pull import pull
from outrider.sandbox.rootfs.store import ImageStore, RootImage
from outrider.sandbox.rootfs.unpack import BadImage
from outrider.service.admission import check_group, parse_body
from outrider.spec import GroupSpec
from support.skopeo import fake_skopeo

from .archives import as_folder, as_tar, oci_files

TASK = {
    "instruction": "x",
    "harness": {"command": ["true"]},
    "runtime": {"kind": "namespace", "image": "tools"},
    "evaluator": {"run": "true"},
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_an_image_from_import_to_removal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = as_tar(oci_files(), tmp_path / "x.tar")
    assert main(["image", "import", str(source), "tools"]) == 0
    assert "tools is" in capsys.readouterr().out
    assert main(["image", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["images"]
    assert (row["name"], row["image"]["workdir"]) == ("tools", "/srv")
    assert Path(row["path"], "bin/tool").read_bytes() == b"1"
    assert main(["image", "list"]) == 0
    assert row["image"]["digest"][7:19] in capsys.readouterr().out
    assert main(["image", "rm", "tools"]) == 0
    assert ImageStore().images() == {}
    assert main(["image", "rm", "tools"]) == 2
    assert "no image 'tools'" in capsys.readouterr().err


def test_a_pull_goes_through_skopeo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert main(["image", "pull", "registry/x:1", "tools"]) == 1
    assert "skopeo is not installed" in capsys.readouterr().err
    layout = as_folder(oci_files(), tmp_path / "layout")
    skopeo = tmp_path / "bin" / "skopeo"
    skopeo.parent.mkdir()
    check = '[ "$3" = docker://registry/x:1 ] || { echo no such image >&2; exit 1; }'
    skopeo.write_text(f'#!/bin/sh\n{check}\ncp -r {layout} "${{4#oci:}}"\n')
    skopeo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{skopeo.parent}:{os.defpath}")
    assert main(["image", "pull", "registry/x:1", "tools"]) == 0
    assert ImageStore().image("tools").workdir == "/srv"
    assert main(["image", "pull", "registry/y", "other"]) == 2
    assert "no such image" in capsys.readouterr().err
    assert main(["image", "pull", "--", "-x", "other"]) == 2


def test_several_images_are_pulled_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch)
    assert main(["image", "pull", "one=registry/x", "none=registry/none", "two=registry/x", "--json"]) == 1
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert [row["name"] for row in told["images"]] == ["one", "two"]
    assert "no such image" in told["failed"]["none"]["message"]
    assert ImageStore().names() == {"one", "two"}
    lines = shown.err.splitlines()
    assert sorted(line for line in lines if line.startswith("pulling")) == [
        "pulling registry/none as none",
        "pulling registry/x as one",
        "pulling registry/x as two",
    ]
    assert sorted(line[-8:] for line in lines if "of 3" in line) == ["(1 of 3)", "(2 of 3)", "(3 of 3)"]
    assert len([line for line in lines if line.startswith(("one is here", "two is here"))]) == 2
    assert len(pulls()) == 2
    assert main(["image", "pull", "three=registry/x"]) == 0
    assert "three is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["registry/x"], "is not NAME=REFERENCE"),
        (["registry/x", "a", "b"], "is not NAME=REFERENCE"),
        (["a=registry/x", "b="], "is not NAME=REFERENCE"),
        (["a=registry/x", "a=registry/y"], "the name 'a' is given twice"),
    ],
)
def test_images_that_a_command_does_not_understand(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["image", "pull", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reference", "asked"),
    [
        ("registry/x:1", "registry/x"),
        ("registry/x", "registry/x"),
        ("host:5000/team/x:1-slim", "host:5000/team/x"),
        ("host:5000/x", "host:5000/x"),
        ("x:1", "x"),
    ],
)
async def test_skopeo_gets_no_tag_beside_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, asked: str
) -> None:
    """skopeo refuses a tag and a digest together. The image still gets the name that was asked for."""
    pulls = fake_skopeo(tmp_path, monkeypatch)
    store, digest = ImageStore(tmp_path / "images"), f"sha256:{'1' * 64}"
    name = f"{reference}@{digest}".replace(":5000", "")
    if asked == "registry/x":
        assert (await pull(f"{reference}@{digest}", name, store)).workdir == "/srv"
        assert store.names() == {name}
    else:
        with pytest.raises(BadImage, match="no such image"):
            await pull(f"{reference}@{digest}", name, store)
    assert pulls() == [f"docker://{asked}@{digest}"]


async def test_pulls_of_one_reference_at_once_download_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch, seconds=0.5)
    store = ImageStore(tmp_path / "images")
    images = await asyncio.gather(*(pull("registry/x", f"tools/{number}", store) for number in range(4)))
    assert pulls() == ["docker://registry/x"]
    assert all(image == images[0] for image in images)
    assert store.names() == {f"tools/{number}" for number in range(4)}
    await pull("registry/x", "tools/0", store)  # a later pull: the registry may have another image by now
    assert len(pulls()) == 2


async def test_a_pull_whose_forerunner_was_cancelled_downloads_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch, seconds=0.5)
    store = ImageStore(tmp_path / "images")
    first = asyncio.create_task(pull("registry/x", "one", store))
    while not pulls():  # noqa: ASYNC110  # another process writes the list
        await asyncio.sleep(0.01)
    second = asyncio.create_task(pull("registry/x", "two", store))
    await asyncio.sleep(0)  # the second pull has found the first
    first.cancel()
    assert (await second).workdir == "/srv"
    assert (first.cancelled(), len(pulls())) == (True, 2)
    assert store.names() == {"two"}


async def test_pulls_that_have_waited_for_one_that_failed_fail_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch, seconds=0.5)
    store = ImageStore(tmp_path / "images")
    ends = await asyncio.gather(*(pull("registry/y", f"tools/{n}", store) for n in range(4)), return_exceptions=True)
    assert {(type(end), str(end)) for end in ends} == {(BadImage, str(ends[0]))}
    assert "cannot get registry/y" in str(ends[0])
    assert len(pulls()) == 1
    with pytest.raises(BadImage):
        await pull("registry/y", "tools/0", store)
    assert len(pulls()) == 2, "a later pull tries again"


async def test_a_failure_on_another_machine_is_not_this_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that share a store may have other networks and other credentials."""
    pulls = fake_skopeo(tmp_path, monkeypatch, seconds=0.2)
    machines = map(str, itertools.count())
    monkeypatch.setattr("outrider.sandbox.rootfs.pull.host_id", lambda: next(machines))
    store = ImageStore(tmp_path / "images")
    ends = await asyncio.gather(*(pull("registry/y", f"tools/{n}", store) for n in range(3)), return_exceptions=True)
    assert [type(end) for end in ends] == [BadImage] * 3
    assert len(pulls()) == 3


async def test_a_full_disk_is_filled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulls = fake_skopeo(tmp_path, monkeypatch, seconds=0.2)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ImageStore, "import_", full)
    store = ImageStore(tmp_path / "images")
    ends = await asyncio.gather(*(pull("registry/x", f"tools/{n}", store) for n in range(3)), return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["BadImage", "BadImage", "OSError"]
    assert all("No space left on device" in str(end) for end in ends)
    assert len(pulls()) == 1


async def test_a_cancelled_pull_ends_after_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread cannot be cancelled. The import must not read a folder that is gone, or run beside the next pull."""
    fake_skopeo(tmp_path, monkeypatch, seconds=0.0)
    importing, go_on = threading.Event(), threading.Event()
    import_ = ImageStore.import_

    def slow(store: ImageStore, path: Path, name: str, *, pulled: bool) -> RootImage:
        importing.set()
        assert go_on.wait(30)
        return import_(store, path, name)

    monkeypatch.setattr(ImageStore, "import_", slow)
    store = ImageStore(tmp_path / "images")
    pulling = asyncio.create_task(pull("registry/x", "one", store))
    await asyncio.to_thread(importing.wait)
    pulling.cancel()
    await asyncio.sleep(0.1)
    assert not pulling.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert store.names() == {"one"}


def test_a_task_may_name_an_image_that_is_there(tmp_path: Path) -> None:
    group = parse_body(GroupSpec, json.dumps({"task": TASK}).encode())
    with pytest.raises(InvalidField, match="no image 'tools'") as refused:
        check_group(group, paths=HostPaths.of(tmp_path))
    assert refused.value.field == "task.runtime.image"
    ImageStore().import_(as_tar(oci_files(), tmp_path / "x.tar"), "tools")
    check_group(group, paths=HostPaths.of(tmp_path))
    both = {**TASK, "runtime": {**TASK["runtime"], "rootfs": "/x"}}  # type: ignore[dict-item]  # a dict of dicts and texts
    with pytest.raises(InvalidField, match="not both"):
        parse_body(GroupSpec, json.dumps({"task": both}).encode())
