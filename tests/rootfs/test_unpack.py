"""Layers become a root: links stay inside it, whiteouts take away, nothing is owned by anybody else."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.rootfs.unpack import BadImage, Contents, unpack


def layer(*entries: tuple[str, Any], compression: str = "") -> io.BytesIO:
    """Each entry is a name and bytes, None for a folder, "-> x" for a link, "= x" for a hard link, or a tar type."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=f"w:{compression}") as archive:
        for name, content in entries:
            member = tarfile.TarInfo(name)
            member.mode, member.uid = 0o6755, 12345
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str) and content.startswith("-> "):
                member.type, member.linkname = tarfile.SYMTYPE, content[3:]
            elif isinstance(content, str) and content.startswith("= "):
                member.type, member.linkname = tarfile.LNKTYPE, content[2:]
            elif isinstance(content, str):
                member.type = content.encode()
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    packed.seek(0)
    return packed


def unpacked(tmp_path: Path, *layers: io.BytesIO) -> tuple[dict[str, Any], Contents]:
    root = tmp_path / "root"
    root.mkdir()
    contents = unpack(layers, root)
    found: dict[str, Any] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            place = Path(folder, name)
            shown = str(place.relative_to(root))
            if place.is_symlink():
                found[shown] = f"-> {os.readlink(place)}"
            elif place.is_dir():
                found[shown] = None
            else:
                found[shown] = place.read_bytes()
    return found, contents


@pytest.mark.parametrize("compression", ["", "gz", "xz", "bz2"])
def test_files_folders_and_links(tmp_path: Path, compression: str) -> None:
    entries = (("./", None), ("./a/b", b"x"), ("c", "-> a/b"), ("d", "= a/b"), ("dev/null", "3"))
    found, contents = unpacked(tmp_path, layer(*entries, compression=compression))
    assert found == {"a": None, "a/b": b"x", "c": "-> a/b", "d": b"x", "dev": None}
    assert contents == Contents(entries=4, bytes=1, left_out=1)
    status = (tmp_path / "root" / "a" / "b").lstat()
    assert (status.st_uid, status.st_mode & 0o7777, status.st_nlink) == (os.getuid(), 0o755, 2)


def test_later_layers_replace_and_take_away(tmp_path: Path) -> None:
    lower = layer(("keep", b"1"), ("gone", b"1"), ("folder/old", b"1"), ("file", b"1"), ("link", "-> keep"))
    upper = layer(
        (".wh.gone", b""), ("folder/new", b"2"), ("folder/.wh..wh..opq", b""), ("file/in", b"2"), ("link", b"2")
    )
    found, _ = unpacked(tmp_path, lower, upper)
    assert found == {
        "keep": b"1",
        "folder": None,
        "folder/new": b"2",
        "file": None,
        "file/in": b"2",
        "link": b"2",
    }


def test_links_are_followed_as_in_the_image(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    first = layer(("var/run", "-> /run"), ("up", "-> ../../../.."), ("host", f"-> {outside}"), ("loop", "-> loop"))
    second = layer(("var/run/pid", b"1"), ("up/etc/x", b"2"), ("host/y", b"3"))
    found, _ = unpacked(tmp_path, first, second)
    assert found["run/pid"] == b"1"
    assert found["etc/x"] == b"2"
    assert found[f"{str(outside).lstrip('/')}/y"] == b"3"
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    "entries",
    [
        [("../x", b"1")],
        [("a/../../x", b"1")],
        [("loop", "-> loop"), ("loop/x", b"1")],
        [("a", None), ("b", "= a")],
        [("b", "= ../../etc/passwd")],
        [("b", "= nowhere")],
        [(".wh.", b"")],
        [(".", b"1")],
    ],
)
def test_what_is_no_image_is_refused(tmp_path: Path, entries: list[tuple[str, Any]]) -> None:
    with pytest.raises(BadImage):
        unpacked(tmp_path, layer(*entries))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("junk", [b"", b"no tar at all" * 100, layer(("a", b"1" * 5000)).getvalue()[:3000]])
def test_broken_archives_are_refused(tmp_path: Path, junk: bytes) -> None:
    with pytest.raises(BadImage, match="layer 0"):
        unpacked(tmp_path, io.BytesIO(junk))


NAMES = st.lists(st.sampled_from(["a", "b", "c", "..", "", ".", "l"]), min_size=1, max_size=4).map("/".join)
CONTENTS = st.one_of(
    st.none(),
    st.binary(max_size=3),
    NAMES.map("-> {}".format),
    NAMES.map("-> /{}".format),
    NAMES.map("= {}".format),
)
LAYERS = st.lists(
    st.tuples(st.one_of(NAMES, NAMES.map("{}/.wh.a".format), st.just("l/.wh..wh..opq")), CONTENTS), max_size=8
)


@given(st.lists(LAYERS, max_size=3))
def test_nothing_outside_is_touched(
    tmp_path_factory: pytest.TempPathFactory, layers: list[list[tuple[str, Any]]]
) -> None:
    folder = tmp_path_factory.mktemp("unpack")
    (folder / "a").write_bytes(b"outside")
    with contextlib.suppress(BadImage):
        unpacked(folder, *(layer(*entries) for entries in layers))
    assert sorted(path.name for path in folder.iterdir()) == ["a", "root"]
    assert (folder / "a").read_bytes() == b"outside"
    assert os.lstat(folder / "a").st_nlink == 1
