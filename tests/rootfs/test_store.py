"""Images imported from the files of other programs, stored once, under names."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from outrider.concurrency.build_once import locked
from outrider.errors import InvalidField, NotFound, RuntimeUnavailable
from outrider.sandbox.rootfs.sif import Partition, root_partition, unpack_sif
from outrider.sandbox.rootfs.store import ImageStore
from outrider.sandbox.rootfs.unpack import BadImage

from .archives import LOWER, MACHINE, as_folder, as_tar, oci_files, saved_files, sif


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["oci folder", "oci tar", "nested", "several machines", "docker save"])
def test_layers_of_every_format_make_the_same_root(store: ImageStore, tmp_path: Path, kind: str) -> None:
    source = {
        "oci folder": lambda: as_folder(oci_files(), tmp_path / "layout"),
        "oci tar": lambda: as_tar(oci_files(), tmp_path / "x.tar"),
        "nested": lambda: as_tar(oci_files(nested=True), tmp_path / "x.tar"),
        "several machines": lambda: as_tar(oci_files(machines=("riscv64", MACHINE)), tmp_path / "x.tar"),
        "docker save": lambda: as_tar(saved_files(), tmp_path / "x.tar"),
    }[kind]()
    image = store.import_(source, "tools/x:1")
    assert store.image("tools/x:1") == image == store.images()["tools/x:1"]
    assert (image.env, image.workdir) == ({"PATH": "/opt/bin:/bin", "EMPTY": ""}, "/srv")
    assert files_of(store.root(image)) == {"bin/tool": b"1", "etc/name": b"2"}


def test_a_plain_tar_is_a_root(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(LOWER)
    image = store.import_(tmp_path / "root.tar", "x")
    assert files_of(store.root(image)) == {"bin/tool": b"1", "gone": b"1"}
    assert (image.entries, image.bytes, image.env, image.workdir) == (2, 2, {}, None)


def test_an_image_that_loses_its_last_name_is_still_there(store: ImageStore, tmp_path: Path) -> None:
    old = store.import_(as_tar(oci_files(), tmp_path / "x.tar"), "x")
    (tmp_path / "new.tar").write_bytes(LOWER)
    new = store.import_(tmp_path / "new.tar", "x")
    assert store.images() == {"x": new, old.digest: old}
    assert store.import_(tmp_path / "new.tar", "x") == new
    assert store.image(old.digest) == old
    assert store.remove(old.digest)
    assert store.images() == {"x": new}
    assert not store.root(old).exists()


def test_the_same_content_is_kept_once_and_goes_with_its_last_name(store: ImageStore, tmp_path: Path) -> None:
    source = as_tar(oci_files(), tmp_path / "x.tar")
    one, two = store.import_(source, "one"), store.import_(source, "two")
    assert one == two
    assert not store.remove("one")
    assert store.root(two).is_dir()
    assert store.remove("two")
    assert store.images() == {}
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [".locks", "names"]
    with pytest.raises(NotFound, match="no image 'two'"):
        store.remove("two")


def test_a_name_moves_to_what_was_imported_last(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(LOWER)
    store.import_(as_tar(oci_files(), tmp_path / "x.tar"), "x")
    image = store.import_(tmp_path / "root.tar", "x")
    assert store.image("x") == image


def test_many_at_once_unpack_it_once(store: ImageStore, tmp_path: Path) -> None:
    source = as_tar(oci_files(), tmp_path / "x.tar")
    with ThreadPoolExecutor(16) as pool:
        images = list(pool.map(lambda number: store.import_(source, f"n{number}"), range(64)))
    assert len({image.created for image in images}) == 1
    assert len(store.images()) == 64


def test_an_image_that_is_named_during_its_removal_is_kept_or_made_again(store: ImageStore, tmp_path: Path) -> None:
    """The test locks the image's folder, so the removal waits after it has looked for other names and before it removes
    the folder."""
    source = as_tar(oci_files(), tmp_path / "x.tar")
    first = store.import_(source, "one")
    with ThreadPoolExecutor(2) as pool:
        with locked(store.root(first).parent):
            removing = pool.submit(store.remove, "one")
            while "one" in store.names():
                assert not removing.done()
            importing = pool.submit(store.import_, source, "two")
            wait([importing], timeout=0.3)  # an import that does not wait for the removal ends here
        assert removing.result()
        assert importing.result().digest == first.digest
    assert files_of(store.root(store.image("two"))) == {"bin/tool": b"1", "etc/name": b"2"}


def test_names_that_come_and_go_at_once_leave_only_whole_images(store: ImageStore, tmp_path: Path) -> None:
    source = as_tar(oci_files(), tmp_path / "x.tar")

    def come_and_go(number: int) -> None:
        for _ in range(10):
            image = store.import_(source, f"n{number}")
            assert store.image(f"n{number}").digest == image.digest
            assert store.root(image).is_dir()
            store.remove(f"n{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_and_go, range(8)))
    assert store.images() == {}
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [".locks", "names"]


def test_a_name_is_given_without_reading_other_images(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(LOWER)
    other = store.import_(tmp_path / "root.tar", "other")
    description = store.root(other).parent / "image.json"
    description.rename(tmp_path / "whole")
    description.write_bytes(b"{")
    image = store.import_(as_tar(oci_files(), tmp_path / "x.tar"), "x")
    with pytest.raises(NotFound, match="no image of digest"):
        store.give("y", "sha256:00")
    description.unlink()
    assert store.images() == {"x": image}
    with pytest.raises(OSError, match="not empty"):  # a damaged folder is an error, and no endless loop
        store.import_(tmp_path / "root.tar", "other")


def changed(files: dict[str, bytes], suffix: bytes) -> dict[str, bytes]:
    """Return the files with one blob whose content does not match its name."""
    blob = next(name for name, data in files.items() if data == LOWER)
    return files | {blob: LOWER + suffix}


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (changed(oci_files(), b"\0"), "other content"),
        (oci_files(machines=("riscv64",)), "not exactly one"),
        (oci_files() | {"index.json": b"{"}, "not JSON"),
        (oci_files() | {"index.json": b'{"manifests": [{"digest": "md5:1"}]}'}, "sha256"),
        ({"index.json": b'{"manifests": []}'}, "names 0 images"),
        ({"manifest.json": b"[]"}, "several"),
        ({"manifest.json": b'[{"Config": "c", "Layers": []}]'}, "has no c"),
    ],
)
def test_what_is_broken_is_refused_and_leaves_nothing(
    store: ImageStore, tmp_path: Path, files: dict[str, bytes], why: str
) -> None:
    for source in (as_tar(files, tmp_path / "x.tar"), as_folder(files, tmp_path / "x")):
        if source.is_dir() and "manifest.json" in files:
            continue
        with pytest.raises(BadImage, match=why):
            store.import_(source, "x")
    assert store.images() == {}
    assert not list((tmp_path / "images").glob(".draft-*"))


def test_junk_and_bad_names_are_refused(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk" * 1000)
    with pytest.raises(BadImage, match="not a tar archive"):
        store.import_(tmp_path / "junk", "x")
    with pytest.raises(NotFound):
        store.import_(tmp_path / "nowhere", "x")
    for name in ("", "../x", "a//b", "A", "a:", "-x", "x" * 200):
        with pytest.raises(InvalidField):
            store.import_(tmp_path / "junk", name)


def test_the_root_of_a_sif_is_found(tmp_path: Path) -> None:
    found = root_partition(sif(tmp_path / "x.sif", b"hsqs" + bytes(96)))
    assert found == Partition(offset=128 + 3 * 585, size=100)


@pytest.mark.parametrize("fields", [{"format_": 2}, {"kind": 3}, {"offset": 1 << 40}])
def test_a_sif_without_a_root_as_squashfs_is_refused(tmp_path: Path, fields: dict[str, int]) -> None:
    if "offset" in fields:
        path = sif(tmp_path / "x.sif", b"hsqs")
        data = bytearray(path.read_bytes())
        data[128 + 2 * 585 + 17 : 128 + 2 * 585 + 25] = (1 << 40).to_bytes(8, "little")
        path.write_bytes(bytes(data))
    else:
        path = sif(tmp_path / "x.sif", b"hsqs", **fields)
    with pytest.raises(BadImage):
        root_partition(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BadImage):
        root_partition(path)


@pytest.mark.deep
def test_a_sif_is_unpacked(store: ImageStore, tmp_path: Path) -> None:
    if not (shutil.which("mksquashfs") and shutil.which("unsquashfs")):
        (tmp_path / "x.sif").write_bytes(sif(tmp_path / "y.sif", b"hsqs").read_bytes())
        if shutil.which("unsquashfs") is None:
            with pytest.raises(RuntimeUnavailable, match="unsquashfs"):
                store.import_(tmp_path / "x.sif", "x")
        pytest.skip("squashfs-tools are not installed")
    (tmp_path / "root" / "bin").mkdir(parents=True)
    (tmp_path / "root" / "bin" / "tool").write_bytes(b"1")
    subprocess.run(["mksquashfs", tmp_path / "root", tmp_path / "x.sqfs", "-quiet"], check=True, capture_output=True)
    image = store.import_(sif(tmp_path / "x.sif", (tmp_path / "x.sqfs").read_bytes()), "x")
    assert files_of(store.root(image)) == {"bin/tool": b"1"}
    for number in range(11):
        with (tmp_path / "root" / f"zeros{number}").open("wb") as file:
            file.truncate(100 << 20)
    subprocess.run(["mksquashfs", tmp_path / "root", tmp_path / "y.sqfs", "-quiet"], check=True, capture_output=True)
    with pytest.raises(BadImage, match="unpack to 1100 MiB or more"):
        store.import_(sif(tmp_path / "y.sif", (tmp_path / "y.sqfs").read_bytes()), "y")


@pytest.mark.parametrize("listing", ["exec sleep 60", "exit 0"])
def test_a_sif_that_takes_too_long_is_a_bad_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: str
) -> None:
    (tmp_path / "root").mkdir()
    tool = tmp_path / "unsquashfs"
    tool.write_text(f'#!/bin/sh\n[ "$1" = -lln ] && {listing}\nexec sleep 60\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(BadImage, match=r"took over 0\.2 s"):
        unpack_sif(sif(tmp_path / "x.sif", b"hsqs"), tmp_path / "root", seconds=0.2)


def test_an_image_has_layers_within_reason(tmp_path: Path) -> None:
    files = {**saved_files(), "manifest.json": json.dumps([{"Config": "config.json", "Layers": ["a"] * 600}]).encode()}
    archive = as_tar(files, tmp_path / "image.tar")
    with pytest.raises(BadImage, match="600 layers: more than 512"):
        ImageStore(tmp_path / "images").import_(archive, "x")
