"""Dockerfiles: what is read of them, which key they have, and what is refused, with its line."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from outrider.errors import InvalidField
from outrider.sandbox.rootfs.dockerfile import BuildPlan, Copy, MakeFolder, RunInstruction, read_dockerfile
from outrider.sandbox.rootfs.store import ImageStore, RootImage

from .archives import as_tar, oci_files


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """Has one image, `base`, which sets PATH=/opt/bin:/bin and the working directory /srv."""
    store = ImageStore(tmp_path / "images")
    store.import_(as_tar(oci_files(), tmp_path / "x.tar"), "base")
    return store


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "sub" / "b.txt").write_text("b")
    return folder


def planned(context: Path, store: ImageStore, text: str) -> BuildPlan:
    (context / "Dockerfile").write_text(text)
    return read_dockerfile(context, store)


def test_the_steps_of_a_dockerfile(context: Path, store: ImageStore) -> None:
    text = r"""# syntax=docker/dockerfile:1
# escape=\
ARG TAG=base
FROM docker.io/library/${TAG} AS only
ARG WHO="the world" TAG EMPTY
ENV A=1 B="two $WHO" C='not $A' D=\$A PATH=/x:$PATH
ENV OLD form of it
WORKDIR app
WORKDIR /srv/../opt/${A:-none}${NOWHERE:+x}${NOWHERE:-y}
COPY a.txt sub ./in/
add ["a.txt", "/b c"]
COPY --chown=root:root --chmod=0755 --link /a.txt tool
LABEL a=b
EXPOSE 80
USER root
RUN echo one \
# a comment within
    && echo "  two" \

    three
run ["printf", "%s", "$A"]
CMD ["sh"]
"""
    plan = planned(context, store, text)
    assert (plan.base_name, plan.workdir) == ("base", "/opt/1y")
    env = {"A": "1", "B": "two the world", "C": "not $A", "D": "$A", "PATH": "/x:/opt/bin:/bin", "OLD": "form of it"}
    assert plan.env == {"EMPTY": "", **env}
    args = {"WHO": "the world", "TAG": "base"}
    real = context.resolve()
    assert plan.steps == (
        MakeFolder(line=8, path="/srv/app"),
        MakeFolder(line=9, path="/opt/1y"),
        Copy(line=10, sources=(real / "a.txt", real / "sub"), target="/opt/1y/in", into=True),
        Copy(line=11, sources=(real / "a.txt",), target="/b c", into=False),
        Copy(line=12, sources=(real / "a.txt",), target="/opt/1y/tool", into=False, mode="0755"),
        RunInstruction(
            line=16,
            argv=("/bin/sh", "-c", 'echo one     && echo "  two"     three'),
            env=args | env,
            workdir="/opt/1y",
        ),
        RunInstruction(line=21, argv=("printf", "%s", "$A"), env=args | env, workdir="/opt/1y"),
    )


def test_the_key_is_that_of_what_the_image_is_made_of(context: Path, store: ImageStore) -> None:
    text = "FROM base\nCOPY sub /sub\nRUN true\n"

    def key(text: str) -> str:
        return planned(context, store, text).name

    first = key(text)
    assert re.fullmatch(r"dockerfile/[0-9a-f]{32}", first)
    (context / "a.txt").write_text("not copied")
    assert key("# a comment\n" + text.replace("RUN", "LABEL a=b\nRUN")) == first
    others = [key(text + line) for line in ("ENV A=1", "WORKDIR /x", "RUN true", "COPY a.txt /")]
    (context / "sub" / "b.txt").write_text("other")
    others.append(key(text))
    (context / "sub" / "b.txt").chmod(0o755)
    others.append(key(text))
    assert len({first, *others}) == 7


def test_the_key_of_a_dockerfile_never_changes(context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that are already built are found by it. If the same Dockerfile makes another image, increase FORMAT."""
    base = RootImage(digest="sha256:0", source="", created=0.0, bytes=0, entries=0)
    monkeypatch.setattr(ImageStore, "image", lambda self, name: base)
    (context / "a.txt").chmod(0o644)
    plan = planned(context, ImageStore(), "FROM base\nWORKDIR /made\nRUN true\nCOPY a.txt .\n")
    assert plan.digest == "sha256:ce061d5915e1108eaaf03aec18353b38af35eb6a825b01b6dcae4c088415632f"


def test_wildcards_name_what_is_there(context: Path, store: ImageStore) -> None:
    (context / "c.txt").touch()
    [step] = planned(context, store, "FROM base\nCOPY *.txt sub/? /x/\n".replace(" sub/?", " su?/")).steps
    assert isinstance(step, Copy)
    assert [source.name for source in step.sources] == ["a.txt", "c.txt", "sub"]


REFUSED = {
    "RUN true": (1, "RUN comes before FROM"),
    "FROM nowhere:1": (1, "no image 'nowhere:1' on this machine"),
    "FROM --platform=linux/arm64 base": (1, "is not supported here"),
    "FROM base\nFROM base": (2, "a second FROM"),
    "FROM base\nCOPY --from=other a /a": (2, "takes no --from=other"),
    "FROM base\nENTRYPOINT x": (2, "ENTRYPOINT is not supported here"),
    "FROM base\nHEALTHCHECK CMD x": (2, "HEALTHCHECK is not supported"),
    "FROM base\n\n\nUSER nobody": (4, "root is the only user"),
    "FROM base\nRUN --mount=type=cache x": (2, "takes no --mount"),
    "FROM base\nRUN cat <<EOF > x\nRUN\nEOF": (2, "takes no here-document"),
    "FROM base\nRUN": (2, "needs a command"),
    "FROM base\nRUN a \\": (2, "no line follows"),
    "FROM base\nENV A": (2, "not of the form"),
    "FROM base\nENV A='": (2, "No closing quotation"),
    "FROM base\nARG 1=2": (2, "not the name of a variable"),
    "FROM base\nWORKDIR": (2, "needs a path"),
    "FROM base\nCOPY a.txt": (2, "a source and a target"),
    "FROM base\nCOPY no.txt /": (2, "there is no file or folder 'no.txt'"),
    "FROM base\nCOPY *.md /": (2, "nothing in"),
    "FROM base\nCOPY ../secret /": (2, "leads out of"),
    "FROM base\nCOPY sub/../../secret /": (2, "leads out of"),
    "FROM base\nCOPY secret /": (2, "is a link that leads out of"),
    "FROM base\nCOPY se* /": (2, "is a link that leads out of"),
    "FROM base\nCOPY way/secret /": (2, "is a link that leads out of"),
    "FROM base\nCOPY hidden /": (2, "is a link that leads out of"),
    "FROM base\nCOPY pipe /": (2, "there is no file or folder 'pipe'"),
    "FROM base\nCOPY --chmod=755 sub /": (2, "only for files"),
    "FROM base\nCOPY --chown=1000 a.txt /": (2, "takes no --chown=1000"),
    "FROM base\nADD https://example.org/x /": (2, "nothing is downloaded"),
    "FROM base\nADD packed.tar /": (2, "ADD would unpack 'packed.tar'"),
    "# escape=`\nFROM base": (1, "another escape character"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_known_is_refused_with_its_line(context: Path, store: ImageStore, text: str) -> None:
    (context.parent / "secret").write_text("the host's")
    (context / "secret").symlink_to("../secret")
    (context / "way").symlink_to("..")
    (context / "hidden").mkdir()
    (context / "hidden" / "link").symlink_to(context.parent / "secret")
    os.mkfifo(context / "pipe")
    with tarfile.open(context / "packed.tar", "w") as archive:
        archive.add(context / "a.txt", arcname="a.txt")
    line, says = REFUSED[text]
    where = re.escape(f"{context / 'Dockerfile'}, line {line}: ")
    with pytest.raises(InvalidField, match=f"{where}.*{re.escape(says)}"):
        planned(context, store, text)


@pytest.mark.parametrize("character", "\f\v\x1c\x85\u2028")
def test_only_newlines_separate_lines(context: Path, store: ImageStore, character: str) -> None:
    (context / ".dockerignore").write_text(f"# nothing{character}*.txt\n")
    plan = planned(context, store, f"FROM base\r\nRUN printf 'a{character}USER x' \\\r\n  b\r\n")
    assert [step.argv[-1] for step in plan.steps if isinstance(step, RunInstruction)] == [
        f"printf 'a{character}USER x'   b"
    ]
    with pytest.raises(InvalidField, match="line 3: "):
        planned(context, store, f"FROM base\nRUN a{character}b\nUSER x\n")


def test_files_that_would_be_left_out(context: Path, store: ImageStore) -> None:
    (context / ".dockerignore").write_text("# nothing\n\n")
    planned(context, store, "FROM base")
    (context / ".dockerignore").write_text("*.txt")
    with pytest.raises(InvalidField, match=r"\.dockerignore excludes files"):
        planned(context, store, "FROM base")
    (context / ".dockerignore").unlink()
    with pytest.raises(InvalidField, match="has no FROM"):
        planned(context, store, "# nothing")
    with pytest.raises(InvalidField, match="cannot read"):
        read_dockerfile(context / "sub", store)


DOUBLING = "FROM base\nENV A=0123456789\n" + "ENV A=$A$A\n" * 40
BOMBS: dict[str, str] = {
    "doubling": DOUBLING,
    "doubling arguments": DOUBLING.replace("ENV", "ARG"),
    "doubling defaults": "ARG A=0123456789\n" + "ARG A=${A}${A:-x}\n" * 40 + "FROM base\n",
    "one word of many": "FROM base\nENV A=" + "a" * 60_000 + "\nENV B=" + "$A" * 10_000 + "\n",
    "many words": "FROM base\nENV A=" + "a" * 60_000 + "\nENV " + " ".join(f"B{n}=$A" for n in range(3000)) + "\n",
    "many variables": "FROM base\nENV A=" + "a" * 30_000 + "\n" + "".join(f"ENV B{n}=$A\n" for n in range(900)),
    "copied": "FROM base\nENV A=" + "a" * 60_000 + "\nCOPY " + "$A " * 10_000 + "/\n",
    "folders": "FROM base\n" + f"WORKDIR {'a/' * 500}\n" * 500,
    "steps": "FROM base\n" + "RUN true\n" * 10_000,
    "size": "FROM base\n" + "# " + "a" * (1 << 20),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_dockerfile_that_grows_is_refused(context: Path, store: ImageStore, bomb: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidField) as raised:
            planned(context, store, BOMBS[bomb])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 128 << 20
    assert len(raised.value.message) < 1000
    assert "Dockerfile" in raised.value.message


def test_an_ignore_file_that_is_no_text_is_refused(context: Path, store: ImageStore) -> None:
    (context / ".dockerignore").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidField, match="not text in UTF-8"):
        planned(context, store, "FROM base\n")


def test_a_tar_with_a_huge_header_is_no_bomb_of_add(context: Path, store: ImageStore) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 4 << 30
    with gzip.open(context / "bomb.gz", "wb", 1) as packed:
        packed.write(header.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    planned(context, store, "FROM base\nADD bomb.gz /\n")  # it is no archive, so it is copied as it is
