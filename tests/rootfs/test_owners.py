"""The owners of an image's files: what the store records, and for which images a sandbox needs several users."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from outrider.sandbox.rootfs.owners import Owners, Ownership, kept_owners, packed, unpacked
from outrider.sandbox.rootfs.store import ImageStore, RootImage
from outrider.sandbox.rootfs.unpack import unpack

PASSWD = (
    b"root:x:0:0::/root:/bin/sh\n_apt:x:42:65534::/nonexistent:/bin/false\npostgres:x:101:104::/var/lib:/bin/sh\nbad\n"
)


def layer(*entries: tuple[str, bytes | str | None, int, int]) -> io.BytesIO:
    """Return a layer. Each entry is a path, a content (bytes for a file, None for a folder, or the target of a link), a
    user id and a group id."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content, uid, gid in entries:
            member = tarfile.TarInfo(name)
            member.mode, member.uid, member.gid = 0o755, uid, gid
            if isinstance(content, bytes):
                member.size = len(content)
            else:
                member.type, member.linkname = (tarfile.DIRTYPE, "") if content is None else (tarfile.SYMTYPE, content)
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    stream.seek(0)
    return stream


BASE = (("usr", None, 0, 0), ("etc/passwd", PASSWD, 0, 0))


def owned(tmp_path: Path, *layers: io.BytesIO) -> tuple[Owners, Ownership]:
    root = tmp_path / "root"
    root.mkdir()
    return kept_owners(root, unpack([layer(*BASE), *layers], root).owners)


def test_the_owners_of_all_kinds_of_files(tmp_path: Path) -> None:
    kept, found = owned(
        tmp_path,
        layer(("srv/data", None, 101, 104), ("srv/data/file", b"12345", 101, 104), ("srv/link", "data", 101, 0)),
        layer(("srv/shadow", b"1", 0, 42)),
    )
    assert kept == {"srv/data": (101, 104), "srv/data/file": (101, 104), "srv/link": (101, 0), "srv/shadow": (0, 42)}
    # The root and /srv are copied with the files in them.
    assert found == Ownership(entries=6, bytes=6, foreign="/srv/data of postgres (id 101)", highest=104)
    assert unpacked(packed(kept)) == kept
    odd = {"a b\n\udcff": (1, 2), "c": (70000, 0)}
    assert unpacked(packed(odd)) == odd


def test_a_later_layer_replaces_owners(tmp_path: Path) -> None:
    lower = layer(
        *(("gone/in", b"", 101, 0), ("moved/in", b"", 101, 0), ("again", b"", 101, 0), ("folder", None, 101, 0)),
        *(("real/in", b"", 0, 0), ("theirs", b"", 101, 0), ("made", b"", 101, 0)),
    )
    upper = layer(
        *((".wh.gone", b"", 0, 0), ("moved", "real", 0, 0), ("again", b"", 0, 0), ("folder", None, 0, 0)),
        *(("theirs", b"", 5, 6), ("made/in", b"", 0, 0)),
    )
    assert owned(tmp_path, lower, upper)[0] == {"theirs": (5, 6)}


@pytest.mark.parametrize(
    ("path", "uid", "gid", "needed"),
    [
        ("var/cache/apt/archives/partial", 42, 0, False),  # apt's own user
        ("etc/shadow", 0, 42, False),
        ("home/node/.profile", 1000, 1000, False),
        ("home/node/.profile", 999, 0, True),
        ("app/file", 1000, 0, True),
        ("var/lib/data", 101, 0, True),
    ],
)
def test_files_for_which_a_sandbox_needs_several_users(
    tmp_path: Path, path: str, uid: int, gid: int, needed: bool
) -> None:
    kept, found = owned(tmp_path, layer((path, b"x", uid, gid)))
    assert kept == {path: (uid, gid)}
    assert bool(found.foreign) is needed
    assert not found.unkept


def test_a_home_that_a_build_made_is_used(tmp_path: Path) -> None:
    for name in ("node", "agent"):
        (tmp_path / "home" / name).mkdir(parents=True)
    homes = {"home/node": (1000, 1000), "home/agent": (1001, 1001)}
    assert not kept_owners(tmp_path, homes)[1].foreign
    assert not kept_owners(tmp_path, homes, homes)[1].foreign
    assert kept_owners(tmp_path, homes, {"home/node": (1000, 1000)})[1].foreign == "/home/agent of a user (id 1001)"


def test_who_packed_a_root_stands_for_root(tmp_path: Path) -> None:
    """If a system folder such as /usr belongs to another user, as in an ordinary user's tar of a root, the user's id
    counts as root's."""
    kept, found = owned(
        tmp_path,
        layer(("usr", None, 1000, 1000), ("app", b"", 1000, 1000), ("etc/mine", b"", 1000, 5), ("db", b"", 7, 7)),
    )
    assert kept == {"db": (7, 7)}
    assert found.foreign == "/db of a user (id 7)"


@pytest.mark.parametrize(("uid", "gid"), [(65536, 0), (0x7FFFFFFF, 0), (101, 65536), (-2, 0)])
def test_ids_that_no_sandbox_has(tmp_path: Path, uid: int, gid: int) -> None:
    _, found = owned(tmp_path, layer(("data", b"x", uid, gid)))
    assert f"/data belongs to {uid}:{gid}, and a sandbox has ids up to 65535" == found.unkept


def test_too_much_to_copy(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"x")
    _, found = kept_owners(tmp_path, dict.fromkeys("abc", (5, 5)), most_entries=3)
    assert found.unkept.startswith("4 files of 0 MiB belong to other users or are above such files")


def test_the_names_of_users_are_read_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("secret:x:7:7::/:\n")
    (tmp_path / "root" / "etc").mkdir(parents=True)
    (tmp_path / "root" / "etc" / "passwd").symlink_to(outside)
    (tmp_path / "root" / "data").write_text("")
    found = kept_owners(tmp_path / "root", {"data": (7, 7)})[1]
    assert found.foreign == "/data of a user (id 7)"


def test_a_store_keeps_them_beside_the_image(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    for name, uid in (("plain", 0), ("theirs", 101)):
        file = tmp_path / f"{name}.tar"
        file.write_bytes(layer(*BASE, ("data", b"x", uid, 0)).getvalue())
        store.import_(file, name)
    plain, theirs = store.image("plain"), store.image("theirs")
    assert (store.owners_file(plain), plain.owners) == (None, Ownership())
    listed = store.owners_file(theirs)
    assert listed is not None
    assert unpacked(listed.read_bytes()) == {"data": (101, 0)}
    assert theirs.owners.foreign == "/data of postgres (id 101)"
    before = RootImage(digest="sha256:0", source="", created=0.0, bytes=0, entries=0)
    assert before.owners == Ownership()  # the record of an image from an earlier version
