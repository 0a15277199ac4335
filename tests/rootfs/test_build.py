"""Recipes, the definitions made from them, and the reuse of earlier builds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

from outrider.cli import main
from outrider.errors import InvalidField, NotFound, RuntimeUnavailable
from outrider.sandbox.rootfs.build import Builder, Reuse
from outrider.sandbox.rootfs.recipe import Recipe, definition_of, load_recipe
from outrider.sandbox.rootfs.store import ImageStore
from outrider.sandbox.rootfs.unpack import BadImage
from support.small_root import small_root

from .archives import as_tar, oci_files

RECIPE = """
packages = ["git", "libc6:amd64=2.36-9"]
pip = ["numpy==2.1.0"]
commands = ["mkdir /data", "cd /data\\ntouch a"]

[base]
kind = "docker-archive"
source = "base.tar"

[[files]]
source = "tool"
target = "/opt/tool"

[env]
COLOUR = "dark 'blue'"
"""
GOLDEN = """\
Bootstrap: docker-archive
From: {folder}/base.tar

%files
    {folder}/lines /opt/outrider-requirements.txt
    {folder}/tool /opt/tool

%environment
    export COLOUR='dark '"'"'blue'"'"''

%post
    set -eu
    export COLOUR='dark '"'"'blue'"'"''
    export DEBIAN_FRONTEND=noninteractive
    apt-get -o APT::Sandbox::User=root update
    apt-get -o APT::Sandbox::User=root install -y --no-install-recommends git libc6:amd64=2.36-9
    rm -rf /var/lib/apt/lists/*
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --requirement /opt/outrider-requirements.txt
    rm /opt/outrider-requirements.txt
    mkdir /data
    cd /data
    touch a

%labels
    outrider.version {version}
"""


class Workshop:
    """A folder with a recipe, and a builder that only records its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(RECIPE)
        (folder / "base.tar").write_bytes(b"base")
        (folder / "tool").write_bytes(b"tool")
        self.program = folder / "apptainer"
        self.asked = folder / "asked"
        self.asked.mkdir(exist_ok=True)
        self.notes: list[str] = []
        self.says('cp "$3" $(mktemp {asked}/XXXXXX) && cp "$3" "$2"')

    def says(self, script: str) -> None:
        """Set the builder's script, in which `$2` is the SIF to make and `$3` the definition."""
        begin = '#!/bin/sh\n[ "$2" = --fakeroot ] && shift\n'
        self.program.write_text(begin + script.format(asked=self.asked) + "\n")
        self.program.chmod(0o755)

    def builder(self) -> Builder:
        store = ImageStore(self.folder / "images")
        return Builder(store, folder=self.folder / "builds", program=str(self.program), note=self.notes.append)

    def build(self, reuse: Reuse) -> Path:
        return self.builder().build(load_recipe(self.recipe), reuse)

    def change(self, old: str, new: str) -> None:
        self.recipe.write_text(self.recipe.read_text().replace(old, new))

    @property
    def builds(self) -> int:
        return len(list(self.asked.iterdir()))


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def rendered(workshop: Workshop) -> str:
    definition = definition_of(load_recipe(workshop.recipe), ImageStore(workshop.folder / "images"))
    return definition.render(workshop.folder / "lines")


@pytest.mark.deep
def test_a_recipe_as_a_definition(workshop: Workshop) -> None:
    assert rendered(workshop) == GOLDEN.format(folder=workshop.folder, version=version("outrider"))


def test_a_recipe_of_nothing_but_a_base(workshop: Workshop) -> None:
    workshop.recipe.write_text('base = {kind = "localimage", source = "base.tar"}')
    head, _, labels = rendered(workshop).partition("\n%labels")
    assert head == f"Bootstrap: localimage\nFrom: {workshop.folder}/base.tar\n"
    assert "outrider.version" in labels


def test_bases(workshop: Workshop) -> None:
    store = ImageStore(workshop.folder / "images")
    store.import_(as_tar(oci_files(), workshop.folder / "x.tar"), "tools")
    ours = definition_of(recipe(kind="image", source="tools"), store)
    assert ours.header[0] == ("Bootstrap", "localimage")
    assert ours.identity == store.image("tools").digest
    debian = definition_of(recipe(kind="debootstrap", source="stable", mirror="http://mirror/debian"), store)
    source = (("OSVersion", "stable"), ("MirrorURL", "http://mirror/debian"))
    assert debian.header == (("Bootstrap", "debootstrap"), *source)
    with pytest.raises(NotFound):
        definition_of(recipe(kind="image", source="missing"), store)
    for wrong in ({"kind": "localimage", "source": "/no/such"}, {"kind": "debootstrap", "source": "stable"}):
        with pytest.raises(InvalidField):
            definition_of(recipe(**wrong), store)


def recipe(**base: str) -> Recipe:
    return msgspec.convert({"base": base}, Recipe)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"git"', '"git; reboot"', "not the name of a Debian package"),
        ("COLOUR", "'NOT OK'", "not the name of a variable"),
        ('"mkdir /data"', '"true\\n%post\\nreboot"', "syntax of Apptainer"),
        ('"mkdir /data"', '"echo {{ x }}"', "syntax of Apptainer"),
        ("dark 'blue'", "a\\nb", "one line"),
        ('"/opt/tool"', '"opt/tool"', "absolute"),
        ('"/opt/tool"', '"/opt/a tool"', "spaces"),
        ('"tool"', '"missing"', "there is no"),
        ("base.tar", "missing.tar", "there is no"),
        ("packages", "package", "package"),
        ("docker-archive", "floppy", "floppy"),
        ('"git"', "git", "recipe.toml"),
    ],
)
def test_recipes_that_are_refused(workshop: Workshop, old: str, new: str, complaint: str) -> None:
    workshop.change(old, new)
    with pytest.raises(InvalidField, match=complaint):
        rendered(workshop)


def test_versioned_is_built_again_when_anything_changes(workshop: Workshop) -> None:
    first = workshop.build(Reuse.VERSIONED)
    assert workshop.build(Reuse.VERSIONED) == first
    assert workshop.builds == 1
    assert "built before" in workshop.notes[-1]
    workshop.change("touch a", "touch b")
    assert workshop.build(Reuse.VERSIONED) != first
    (workshop.folder / "tool").write_bytes(b"other")
    workshop.build(Reuse.VERSIONED)
    (workshop.folder / "base.tar").write_bytes(b"other")
    workshop.build(Reuse.VERSIONED)
    assert workshop.builds == 4


def test_lock_installs_again_only_when_what_is_installed_changes(workshop: Workshop) -> None:
    workshop.build(Reuse.LOCK)
    assert workshop.builds == 2
    texts = [path.read_text() for path in workshop.asked.iterdir()]
    (installs,) = [text for text in texts if "apt-get" in text]
    (rest,) = [text for text in texts if "apt-get" not in text]
    assert "mkdir /data" not in installs
    assert "mkdir /data" in rest
    assert "Bootstrap: localimage" in rest
    workshop.change("touch a", "touch b")
    workshop.build(Reuse.LOCK)
    assert workshop.builds == 3
    workshop.change("numpy==2.1.0", "numpy==2.1.1")
    workshop.build(Reuse.LOCK)
    assert workshop.builds == 5


def test_scratch_is_always_built(workshop: Workshop) -> None:
    first = workshop.build(Reuse.VERSIONED)
    inode = first.stat().st_ino
    assert workshop.build(Reuse.SCRATCH) == first
    assert first.stat().st_ino != inode
    workshop.build(Reuse.SCRATCH)
    assert workshop.builds == 3
    workshop.build(Reuse.VERSIONED)
    assert workshop.builds == 3


def test_a_build_that_takes_too_long_is_a_bad_image(workshop: Workshop) -> None:
    workshop.says("exec sleep 60")
    builder = Builder(
        ImageStore(workshop.folder / "images"),
        folder=workshop.folder / "builds",
        program=str(workshop.program),
        seconds=0.1,
    )
    with pytest.raises(BadImage, match=r"took over 0\.1 s"):
        builder.build(load_recipe(workshop.recipe), Reuse.VERSIONED)


def test_of_64_that_build_the_same_one_does(workshop: Workshop) -> None:
    with ThreadPoolExecutor(64) as pool:
        built = set(pool.map(lambda _: workshop.build(Reuse.VERSIONED), range(64)))
    assert len(built) == workshop.builds == 1
    assert any("waiting for another" in note for note in workshop.notes)
    assert sorted(path.name for path in (workshop.folder / "builds").iterdir()) == [".locks", built.pop().name]


def test_a_failed_build_leaves_nothing_and_can_be_repeated(workshop: Workshop) -> None:
    workshop.says("echo 'no such package' >&2; exit 1")
    with pytest.raises(BadImage) as failed:
        workshop.build(Reuse.VERSIONED)
    assert "no such package" in (failed.value.log_tail or "")
    left = workshop.folder / "builds"
    assert [path.name for path in left.iterdir()] == [".locks"]
    (key,) = (left / ".locks").iterdir()
    (left / f".draft-{key.name}-killed").mkdir()
    Workshop(workshop.folder).build(Reuse.VERSIONED)
    assert sorted(path.name for path in left.iterdir()) == [".locks", key.name]


def test_without_apptainer(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(workshop.folder / "none"))
    with pytest.raises(RuntimeUnavailable, match="not installed"):
        Builder(ImageStore(workshop.folder / "images"), folder=workshop.folder / "builds").build(
            load_recipe(workshop.recipe), Reuse.VERSIONED
        )


@pytest.mark.real
@pytest.mark.timeout(300)
def test_a_real_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe with an imported image as its base is built twice. The second time, nothing is built."""
    for program in ("apptainer", "unsquashfs", "mksquashfs"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    root = small_root(tmp_path / "root")
    subprocess.run(["tar", "-C", str(root), "-cf", str(tmp_path / "root.tar"), "."], check=True)
    assert main(["image", "import", str(tmp_path / "root.tar"), "small"]) == 0
    (tmp_path / "tool").write_text("a tool")
    # As root, Apptainer runs commands only with all existing capabilities.
    commands = 'commands = ["cp /opt/tool /opt/made"]\n' if os.geteuid() else ""
    (tmp_path / "recipe.toml").write_text(
        'base = {kind = "image", source = "small"}\nfiles = [{source = "tool", target = "/opt/tool"}]\n'
        'env = {COLOUR = "blue"}\n' + commands
    )
    capsys.readouterr()
    assert main(["image", "build", str(tmp_path / "recipe.toml"), "built", "--json"]) == 0
    first = capsys.readouterr()
    assert "building with" in first.err
    row = json.loads(first.out)
    assert Path(row["path"], "opt/tool").read_text() == "a tool"
    assert Path(row["path"], "opt/made").exists() == bool(commands)
    assert "export COLOUR=blue" in Path(row["path"], ".singularity.d/env/90-environment.sh").read_text()
    assert main(["image", "build", str(tmp_path / "recipe.toml"), "again", "--json"]) == 0
    second = capsys.readouterr()
    assert "built before" in second.err
    assert json.loads(second.out)["path"] == row["path"]
