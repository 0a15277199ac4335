"""Layers are unpacked into a root: links stay inside the root, whiteouts remove files, and all files belong to the user
of this process."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tarfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.concurrency.build_once import remove_tree
from outrider.errors import OutriderError
from outrider.sandbox.rootfs.store import ImageStore
from outrider.sandbox.rootfs.unpack import NEWEST, OLDEST, BadImage, Contents, Room, unpack


def layer(*entries: tuple[str, Any], compression: str = "", owner: int = 0) -> io.BytesIO:
    """Return a layer. Each entry is a name, and bytes, None for a folder, "-> x" for a link, "= x" for a hard link, or
    a tar type."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=f"w:{compression}") as archive:  # type: ignore[call-overload]  # one of its modes
        for name, content in entries:
            member = tarfile.TarInfo(name)
            member.mode, member.uid = 0o6755, owner
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
    found, contents = unpacked(tmp_path, layer(*entries, compression=compression, owner=12345))
    assert found == {"a": None, "a/b": b"x", "c": "-> a/b", "d": b"x", "dev": None}
    owners = dict.fromkeys(("", "a/b", "c", "d"), (12345, 0))
    assert contents == Contents(entries=4, bytes=1, left_out=1, owners=owners)
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


def odd(**fields: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo("x")
    for name, value in fields.items():
        setattr(member, name, value)
    return member


def packed(*members: tarfile.TarInfo) -> io.BytesIO:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"1" * max(0, member.size)))
    whole.seek(0)
    return whole


@pytest.mark.parametrize(
    ("mtime", "kept"),
    [("1e30", NEWEST), ("-1e30", OLDEST), ("nan", 0), ("inf", NEWEST), ("-inf", OLDEST), ("-5.5", -5.5), ("12", 12)],
)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE])
def test_absurd_times_are_the_nearest_that_can_be_kept(tmp_path: Path, mtime: str, kept: float, kind: bytes) -> None:
    unpacked(tmp_path, packed(odd(type=kind, pax_headers={"mtime": mtime})))
    assert (tmp_path / "root" / "x").stat().st_mtime == kept


def test_owners_and_devices_beyond_all_numbers_are_left_out(tmp_path: Path) -> None:
    rich = odd(name="rich", pax_headers={"uid": str(1 << 40), "gid": str(1 << 70), "uname": "x" * 5000})
    device = odd(name="device", type=tarfile.CHRTYPE, devmajor=0o7777777, devminor=0o7777777)
    found, contents = unpacked(tmp_path, packed(rich, device))
    assert (found, contents.left_out) == ({"rich": b""}, 1)


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "\udcff", "a b", ".", "wh.x", "%2e%2e", "\\", "x" * 255])
def test_odd_names_are_names(tmp_path: Path, name: str) -> None:
    found, _ = unpacked(tmp_path, layer((f"in/{name}/x", b"1")))
    assert found[os.path.normpath(f"in/{name}/x")] == b"1"


ABSURD = {
    "deep": lambda: layer(("/".join("a" * 3000), b"1")),
    "deep by links": lambda: layer(
        *[(f"l{n}", f"-> l{n - 1}/" + "/".join("a" * 100) if n else "-> b") for n in range(30)], ("l29/x", b"1")
    ),
    "long": lambda: layer(("x" * 300, b"1")),
    "a size below nothing": lambda: packed(odd(pax_headers={"size": "-1024"})),
    "a size beyond all": lambda: packed(odd(pax_headers={"size": str(1 << 90)})),
    "a name with NUL": lambda: packed(odd(pax_headers={"path": "a\0b"})),
    "a link with NUL": lambda: packed(odd(type=tarfile.SYMTYPE, linkname="a", pax_headers={"linkpath": "a\0b"})),
    "a hard link in a circle": lambda: layer(("a", "= b"), ("b", "= a")),
    "a hard link to a device": lambda: layer(("a", "3"), ("b", "= a")),
    "a hard link out": lambda: layer(("a", "= ../../etc/passwd")),
    "a whiteout of nothing": lambda: layer((".wh.", b"")),
    "a whiteout of all": lambda: layer((".wh...", b"")),
    "a large header": lambda: packed(odd(pax_headers={"comment": "x" * (2 << 20)})),
    "headers of headers": lambda: io.BytesIO(header_of_headers(3000)),
    "cut gzip": lambda: io.BytesIO(layer(("a", bytes(range(256)) * 400), compression="gz").getvalue()[:-300]),
    "broken xz": lambda: io.BytesIO(broken(layer(("a", os.urandom(90_000)), compression="xz").getvalue())),
    "cut": lambda: io.BytesIO(layer(("a", b"1" * 100_000)).getvalue()[:5000]),
}


def header_of_headers(number: int) -> bytes:
    """Return PAX headers, each of which describes the next one."""
    one = tarfile.TarInfo("x")
    one.type, one.size = tarfile.XHDTYPE, 0
    return one.tobuf(tarfile.USTAR_FORMAT) * number


def broken(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + b"\xff" * 64 + data[middle + 64 :]


@pytest.mark.parametrize("compression", ["", "gz"])
@pytest.mark.parametrize("what", ABSURD)
def test_what_cannot_be_is_refused_in_words_and_leaves_nothing(tmp_path: Path, what: str, compression: str) -> None:
    data = ABSURD[what]().getvalue()
    source = tmp_path / "image.tar"
    source.write_bytes(gzip.compress(data, 1) if compression else data)
    with pytest.raises(BadImage):
        ImageStore(tmp_path / "images").import_(source, "x")
    assert sorted(path.name for path in (tmp_path / "images").glob("*")) in ([], [".locks"])


def test_entries_that_are_there_often_are_there_once(tmp_path: Path) -> None:
    entries = [("a", b"1"), ("a", None), ("a/b", b"2"), ("a", "-> c"), ("a", b"3"), ("d", "= a"), ("a", b"4")]
    found, _ = unpacked(tmp_path, layer(*entries))
    assert found == {"a": b"4", "d": b"3"}


@pytest.mark.deep
def test_a_tree_deeper_than_any_path_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    at = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 9, 0o700, dir_fd=at)
        os.close(os.open("f", os.O_CREAT, dir_fd=at))
        below = os.open("d" * 9, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.chmod(at, 0o500)
    os.close(at)
    remove_tree(top)
    assert not top.exists()


def sparse(size: int) -> io.BytesIO:
    """Return a layer with a file of `size` zeros, none of which are in the archive."""
    headers = {"GNU.sparse.size": str(size), "GNU.sparse.map": f"{size},0", "GNU.sparse.name": "big"}
    return packed(odd(pax_headers=headers))


def zeros(size: int) -> bytes:
    """Return a layer with a file of `size` zeros. After a full flush, pieces with the same content are compressed to
    the same bytes."""
    header = tarfile.TarInfo("big")
    header.size = size
    packer = zlib.compressobj(wbits=31)
    head, piece = (packer.compress(data) + packer.flush(zlib.Z_FULL_FLUSH) for data in (header.tobuf(), bytes(1 << 20)))
    return head + piece * ((size >> 20) + 1) + packer.flush()


def imported(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "image.tar").write_bytes(data)
    ImageStore(tmp_path / "images").import_(tmp_path / "image.tar", "x")


@pytest.mark.parametrize("compression", ["", "gz"])
def test_a_small_archive_of_a_large_image_is_refused(tmp_path: Path, compression: str) -> None:
    data = sparse(8_600_000_000).getvalue()
    data = gzip.compress(data) if compression else data
    with pytest.raises(BadImage, match="unpack to 8201 MiB or more"):
        imported(tmp_path, data)
    with pytest.raises(BadImage, match="larger than 64 GiB"):
        imported(tmp_path, sparse(1 << 40).getvalue())
    assert sum(path.stat().st_blocks for path in tmp_path.rglob("*")) < 1000


def test_zeros_beyond_the_size_of_an_image_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="unpack to 1100 MiB or more"):
        imported(tmp_path, zeros(1100 << 20))
    assert sum(path.stat().st_blocks for path in tmp_path.rglob("*")) < 100_000


def test_entries_that_are_left_out_count_too(tmp_path: Path) -> None:
    """The data of a device is not written, but read and counted."""
    header = tarfile.TarInfo("device")
    header.type, header.size = tarfile.CHRTYPE, 1 << 40
    with pytest.raises(BadImage):
        imported(tmp_path, header.tobuf(tarfile.GNU_FORMAT) + bytes(4096))


def test_room_for_an_image_is_counted_over_its_layers(tmp_path: Path) -> None:
    room = Room(tmp_path, 20 << 20)
    room.take(1500 << 20)
    with pytest.raises(BadImage, match="unpack to 2500 MiB"):
        room.take(1000 << 20)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    if free < 60 << 30:
        room = Room(tmp_path, 64 << 30)
        with pytest.raises(BadImage, match="leaves too little of the"):
            room.take(free)


SEEDS = [layer(*(("bin/tool", b"1" * 600), ("gone", "-> bin"), ("etc", None), ("x", "= bin/tool"))).getvalue()]
SEEDS += [gzip.compress(SEEDS[0]), sparse(1 << 20).getvalue()]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.sampled_from(SEEDS),
    changes=st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=12)), max_size=6),
    cut=st.none() | st.integers(0, 4000),
)
def test_of_any_archive_comes_an_image_or_one_error(
    tmp_path: Path, seed: bytes, changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    data = bytearray(seed)
    for at, text in changes:
        data[at : at + len(text)] = text
    for at in range(0, len(data) - 512, 512):  # sets the checksum: otherwise a changed header is no header
        block = data[at : at + 512]
        if block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(block)
    with contextlib.suppress(OutriderError):
        imported(tmp_path, bytes(data[:cut]))
