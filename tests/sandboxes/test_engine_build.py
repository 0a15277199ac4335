"""Images built by a container engine: by a fake engine program, and by a real engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.errors import InvalidField, RuntimeUnavailable
from outrider.sandbox.engine_build import BuildEngine, build_by_engine, built_image, engine_name
from outrider.sandbox.rootfs.dockerfile import Health
from outrider.sandbox.rootfs.store import ImageStore
from outrider.sandbox.rootfs.unpack import BadImage
from rootfs.archives import as_tar, oci_files
from support.small_root import small_root

PROGRAM = """#!/bin/sh
echo "$@" >> {log}
case "$1 $2" in
build*) {build} ;;
image*) echo {user} ;;
save*) for last; do :; done; while [ "$1" != --output ]; do shift; done; cp {archive} "$2" ;;
esac
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    return ImageStore()


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "task" / "environment"
    folder.mkdir(parents=True)
    (folder / "in.txt").write_text("hello\n")
    (folder / "Dockerfile").write_text("FROM scratch\nONBUILD RUN x\nHEALTHCHECK CMD test -e /x\n")
    return folder


def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, build: str = "true", user: str = "") -> Path:
    """Put a fake program named podman first in PATH. Returns the file in which it logs its arguments."""
    log, archive = tmp_path / "log", as_tar(oci_files(), tmp_path / "image.tar")
    program = tmp_path / "bin" / "podman"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(log=log, archive=archive, build=build, user=user))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return log


def test_what_an_engine_built_is_found(
    tmp_path: Path,
    context: Path,
    store: ImageStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = engine(tmp_path, monkeypatch)
    with pytest.raises(InvalidField, match="line 1: an image without a base") as refused:
        built_image(context, store)
    assert f"outrider image build {context} --engine podman" in str(refused.value.hint)
    assert main(["image", "build", str(context), "mine", "--engine", "podman", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "mine"
    name = engine_name(context)
    assert log.read_text().splitlines()[0] == (
        f"build --tag {name} --network none --file {context}/Dockerfile {context}"
    )
    built = built_image(context, store)
    assert (built.name, built.health) == (name, Health(command="test -e /x"))
    assert store.image("mine") == store.image(name)
    (context / "in.txt").write_text("other")
    with pytest.raises(InvalidField, match="line 1: an image without a base"):
        built_image(context, store)
    (context / ".dockerignore").write_text("in.txt\n")
    ignored = engine_name(context)
    (context / "in.txt").write_text("third")
    assert engine_name(context) == ignored != name


def test_an_engine_has_a_network_only_if_asked(
    tmp_path: Path,
    context: Path,
    store: ImageStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = engine(tmp_path, monkeypatch, build="echo no name server >&2; exit 3")
    with pytest.raises(BadImage, match="podman build --tag exited with 3") as failed:
        build_by_engine(context, store, BuildEngine.PODMAN)
    assert (failed.value.log_tail, "--network" in str(failed.value.hint)) == ("no name server\n", True)
    with pytest.raises(BadImage):
        build_by_engine(context, store, BuildEngine.PODMAN, network=True)
    assert "--network" not in log.read_text().splitlines()[1]
    assert main(["image", "build", str(context), "--network"]) == 2
    assert "--network is of a container engine" in capsys.readouterr().err
    assert main(["image", "build", str(context), "--engine", "podman", "--allow-host", "x"]) == 2
    assert "cannot be kept to some hosts" in capsys.readouterr().err


def test_what_no_sandbox_honours_is_refused(
    tmp_path: Path, context: Path, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(tmp_path, monkeypatch, user="agent")
    with pytest.raises(InvalidField, match="has the user 'agent' of its base"):
        build_by_engine(context, store, BuildEngine.PODMAN)
    for line, says in (("USER agent", "root is the only user"), ("ENTRYPOINT /serve", "starts no program")):
        (context / "Dockerfile").write_text(f"FROM scratch\n{line}\n")
        with pytest.raises(InvalidField, match=f"Dockerfile, line 2: .*{says}"):
            build_by_engine(context, store, BuildEngine.PODMAN)
    monkeypatch.setenv("PATH", str(tmp_path))
    (context / "Dockerfile").write_text("FROM a\nUSER agent\nUSER root\nFROM b\n")
    with pytest.raises(RuntimeUnavailable, match="podman is not installed"):
        build_by_engine(context, store, BuildEngine.PODMAN)


@pytest.fixture
def real_engine() -> Iterator[BuildEngine]:
    """A container engine that works on this machine. Images that the test adds are removed."""
    why = []
    for kind in BuildEngine:
        if (program := shutil.which(kind)) is None:
            why.append(f"{kind} is not installed")
            continue
        info = subprocess.run([program, "images", "--quiet", "--no-trunc"], capture_output=True, text=True, check=False)
        if info.returncode != 0:
            why.append(f"{kind}: {info.stderr.strip()[-200:]}")
            continue
        yield kind
        after = subprocess.run([program, "images", "--quiet", "--no-trunc"], capture_output=True, text=True, check=True)
        if new := set(after.stdout.split()) - set(info.stdout.split()):
            subprocess.run([program, "rmi", "--force", *new], capture_output=True, check=True)
        return
    pytest.skip("; ".join(why))


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_real_engine_builds_what_our_builder_cannot(
    context: Path, store: ImageStore, real_engine: BuildEngine
) -> None:
    small_root(context / "root")
    with tarfile.open(context / "root.tar", "w") as archive:
        archive.add(context / "root", arcname=".")
    (context / ".dockerignore").write_text("root\n")
    text = "FROM scratch\nADD root.tar /\nENV A=1\nWORKDIR /app\nRUN echo made > made && ls /sys/class/net > net\n"
    (context / "Dockerfile").write_text(text)
    image = build_by_engine(context, store, real_engine, name="mine")
    root = store.root(image)
    assert (root / "app/made").read_text() == "made\n"
    assert (root / "app/net").read_text().split() == ["lo"]
    assert (image.env["A"], image.workdir) == ("1", "/app")
    assert built_image(context, store).name in store.names()
