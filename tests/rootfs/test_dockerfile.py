"""Dockerfiles: how they are read, which key they have, and refusals that name the line."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from outrider.errors import InvalidField
from outrider.sandbox.rootfs.dockerfile import (
    BuildPlan,
    Copy,
    CopyFrom,
    Health,
    MakeFolder,
    RunInstruction,
    WriteFile,
    read_dockerfile,
)
from outrider.sandbox.rootfs.store import ImageStore, RootImage

from .archives import as_tar, oci_files


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """A store with one image, `base`, which sets PATH=/opt/bin:/bin and the working directory /srv."""
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
    assert (plan.base.name, plan.workdir) == ("base", "/opt/1y")
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
    """Images that are already built are found by their key. If the same Dockerfile makes another image, increase
    FORMAT."""
    base = RootImage(digest="sha256:0", source="", created=0.0, bytes=0, entries=0)
    monkeypatch.setattr(ImageStore, "image", lambda self, name: base)
    (context / "a.txt").chmod(0o644)
    plan = planned(context, ImageStore(), "FROM base\nWORKDIR /made\nRUN true\nCOPY a.txt .\n")
    assert plan.digest == "sha256:8ccfd3cfd28919f48757574e12f02f7e77e807f25c037b2140582bfe5ac419dc"


def test_wildcards_name_what_is_there(context: Path, store: ImageStore) -> None:
    (context / "c.txt").touch()
    [step] = planned(context, store, "FROM base\nCOPY *.txt su?/ /x/\n").steps
    assert isinstance(step, Copy)
    assert [source.name for source in step.sources] == ["a.txt", "c.txt", "sub"]


REFUSED = {
    "RUN true": (1, "RUN comes before FROM"),
    "FROM nowhere:1": (1, "no image 'nowhere:1' on this machine"),
    "FROM --platform=linux/arm64 base": (1, "asks for the platform linux/arm64"),
    "FROM base\nENTRYPOINT x": (2, "a sandbox starts no program of its image"),
    'FROM base\nENTRYPOINT ["/bin/sh", "/start.sh"]': (2, "a sandbox starts no program of its image"),
    "FROM base\nONBUILD RUN x": (2, "ONBUILD is not supported here"),
    "FROM scratch": (1, "without a base (scratch)"),
    "FROM base@sha256:1234": (1, "'sha256:1234' is no digest"),
    "FROM base AS a\nCOPY --from=a x /": (2, "takes files from its own stage 'a'"),
    "FROM base AS a\nCOPY --from=0 x /": (2, "there is no image '0' on this machine"),
    "FROM base\nCOPY --from=other a /a": (2, "there is no image 'other' on this machine"),
    "FROM base\nADD --from=base a /a": (2, "takes no --from=base"),
    "FROM base\nHEALTHCHECK --often CMD x": (2, "takes no --often"),
    "FROM base\nHEALTHCHECK --interval=soon CMD x": (2, "takes no --interval=soon"),
    "FROM base\nHEALTHCHECK x": (2, "not of the form"),
    "FROM base\nSHELL bash": (2, "needs a JSON list"),
    "FROM base\nRUN cat <<EOF > x\nRUN\n": (2, "the here-document EOF has no end"),
    "FROM base\nCOPY left.md /": (2, ".dockerignore leaves 'left.md' out"),
    "FROM base\n\n\nUSER nobody": (4, "root is the only user"),
    "FROM base\nRUN --mount=type=cache x": (2, "takes no --mount"),
    "FROM base\nRUN": (2, "needs a command"),
    "FROM base\nRUN a \\": (2, "no line follows"),
    "FROM base\nENV A": (2, "not of the form"),
    "FROM base\nENV A='": (2, "No closing quotation"),
    "FROM base\nARG 1=2": (2, "not the name of a variable"),
    "FROM base\nWORKDIR": (2, "needs a path"),
    "FROM base\nCOPY a.txt": (2, "a source and a target"),
    "FROM base\nCOPY no.txt /": (2, "there is no file or folder 'no.txt'"),
    "FROM base\nCOPY *.rst /": (2, "nothing in"),
    "FROM base\nCOPY ../secret /": (2, "leads out of"),
    "FROM base\nCOPY sub/../../secret /": (2, "leads out of"),
    "FROM base\nCOPY secret /": (2, "is a link that leads out of"),
    "FROM base\nCOPY se* /": (2, "is a link that leads out of"),
    "FROM base\nCOPY way/secret /": (2, "is a link that leads out of"),
    "FROM base\nCOPY hidden /": (2, "is a link that leads out of"),
    "FROM base\nCOPY pipe /": (2, "there is no file or folder 'pipe'"),
    "FROM base\nCOPY --chmod=755 sub /": (2, "only for files"),
    "FROM base\nADD https://example.org/x /": (2, "nothing is downloaded"),
    "FROM base\nADD packed.tar /": (2, "ADD would unpack 'packed.tar'"),
    "# escape=`\nFROM base": (1, "another escape character"),
    "FROM base\nENV A=${PATH%%:*}": (2, "${PATH%%:*}"),
    "FROM base\nENV A=${B:-${C:-x}}": (2, "is not of the forms"),
    "FROM base\nCOPY <<E /x\n${A:?no}\nE": (2, "is not of the forms"),
    "FROM $UNSET": (1, "FROM $UNSET is not supported"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_known_is_refused_with_its_line(context: Path, store: ImageStore, text: str) -> None:
    (context.parent / "secret").write_text("the host's")
    (context / "secret").symlink_to("../secret")
    (context / "way").symlink_to("..")
    (context / "hidden").mkdir()
    (context / "hidden" / "link").symlink_to(context.parent / "secret")
    os.mkfifo(context / "pipe")
    (context / "left.md").touch()
    (context / ".dockerignore").write_text("left.md")
    with tarfile.open(context / "packed.tar", "w") as archive:
        archive.add(context / "a.txt", arcname="a.txt")
    line, says = REFUSED[text]
    where = re.escape(f"{context / 'Dockerfile'}, line {line}: ")
    with pytest.raises(InvalidField, match=f"{where}.*{re.escape(says)}") as refused:
        planned(context, store, text)
    assert refused.value.hint


@pytest.mark.parametrize("character", "\f\v\x1c\x85\u2028")
def test_only_newlines_separate_lines(context: Path, store: ImageStore, character: str) -> None:
    (context / ".dockerignore").write_text(f"# nothing{character}*.txt\n")
    plan = planned(context, store, f"FROM base\r\nRUN printf 'a{character}USER x' \\\r\n  b\r\n")
    assert [step.argv[-1] for step in plan.steps if isinstance(step, RunInstruction)] == [
        f"printf 'a{character}USER x'   b"
    ]
    with pytest.raises(InvalidField, match="line 3: "):
        planned(context, store, f"FROM base\nRUN a{character}b\nUSER x\n")


def test_a_dockerfile_that_is_none(context: Path, store: ImageStore) -> None:
    with pytest.raises(InvalidField, match="has no FROM"):
        planned(context, store, "# nothing")
    with pytest.raises(InvalidField, match="cannot read"):
        read_dockerfile(context / "sub", store)
    assert planned(context, store, "\ufeffFROM base\n").steps == ()
    (context.parent / "secret").write_text("root:x:0:0")
    for name in ("Dockerfile", ".dockerignore"):
        (context / name).unlink(missing_ok=True)
        (context / name).symlink_to("../secret")
        with pytest.raises(InvalidField, match=f"{name} is a link that leads out of") as refused:
            read_dockerfile(context, store)
        assert "root:x" not in refused.value.message
        (context / name).unlink()
        (context / "Dockerfile").write_text("FROM base\n")


def left_out(context: Path, store: ImageStore, patterns: str) -> list[str]:
    """Return the files of the context that COPY leaves out."""
    (context / ".dockerignore").write_text(patterns)
    [step] = planned(context, store, "FROM base\nCOPY . /\n").steps
    assert isinstance(step, Copy)
    return sorted(str(path.relative_to(context.resolve())) for path in step.without)


@pytest.mark.parametrize(
    ("patterns", "out"),
    [
        ("# nothing\n\n", []),
        ("*.txt", ["a.txt"]),
        ("**/*.txt", ["a.txt", "sub/b.txt", "sub/deep/c.txt"]),
        ("/sub/", ["sub"]),
        ("sub/*", ["sub/b.txt", "sub/deep"]),
        ("sub\n!sub/deep/c.txt\n", ["sub/b.txt"]),
        ("!a.txt\n*.txt", ["a.txt"]),
        ("**/deep", ["sub/deep"]),
        ("sub/**/c.txt", ["sub/deep/c.txt"]),
        ("sub/?.[a-t]xt", ["sub/b.txt"]),
        ("sub/[^a].txt", ["sub/b.txt"]),
        ("\\a.txt", ["a.txt"]),
        (".\n!sub", [".dockerignore", "Dockerfile", "a.txt"]),
        ("**\n", [".dockerignore", "Dockerfile", "a.txt", "sub"]),
    ],
)
def test_files_that_are_left_out(context: Path, store: ImageStore, patterns: str, out: list[str]) -> None:
    (context / "sub" / "deep").mkdir()
    (context / "sub" / "deep" / "c.txt").touch()
    assert left_out(context, store, patterns) == out


def test_a_file_that_is_left_out_changes_no_key(context: Path, store: ImageStore) -> None:
    text = "FROM base\nCOPY sub /\n"
    (context / "sub" / "noise.log").write_text("1")
    whole = planned(context, store, text).name
    (context / ".dockerignore").write_text("**/*.log")
    (context / "sub" / "noise.log").write_text("2")
    less = planned(context, store, text).name
    (context / "sub" / "noise.log").write_text("3")
    assert planned(context, store, text).name == less != whole
    (context / ".dockerignore").write_text("# nothing")
    assert planned(context, store, text).name != whole  # noise.log has other content
    (context / "Dockerfile.dockerignore").write_text("**/*.log")
    assert planned(context, store, text).name == less


@pytest.mark.timeout(10)
def test_patterns_that_are_none_or_that_take_long(context: Path, store: ImageStore) -> None:
    for pattern in ("a\n[a", "x\na\\"):
        with pytest.raises(InvalidField, match=r"\.dockerignore, line 2: .* is no pattern") as refused:
            left_out(context, store, pattern)
        assert refused.value.hint
    (context / ("a" * 200)).touch()
    assert left_out(context, store, "*a" * 200 + "b\n" + "**/" * 1000 + "x\n") == []
    with pytest.raises(InvalidField, match="more than 1024 patterns"):
        left_out(context, store, "x\n" * 1025)


def test_the_files_of_stages_and_of_other_images(context: Path, store: ImageStore) -> None:
    text = 'FROM base AS tools\nENV A=1\nRUN make\nFROM tools AS more\nSHELL ["/bin/bash", "-c"]\nFROM base\n'
    text += "COPY --from=tools --chmod=755 /opt/a bin/b /in/\nCOPY --from=1 / /whole\nCOPY --from=base x* /\nRUN x\n"
    plan = planned(context, store, text)
    one, two, three, run = plan.steps
    assert isinstance(one, CopyFrom)
    assert isinstance(two, CopyFrom)
    assert isinstance(three, CopyFrom)
    assert (one.sources, one.target, one.into, one.mode) == (("/opt/a", "/bin/b"), "/in", True, "755")
    assert (two.sources, two.into, three.sources, three.into) == (("/",), False, ("/x*",), True)
    assert one.origin.plan is not None
    assert one.origin.plan.env == {"PATH": "/opt/bin:/bin", "EMPTY": "", "A": "1"}
    assert two.origin.plan is not None
    assert two.origin.plan.base.plan == one.origin.plan
    assert (three.origin.plan, three.origin.name) == (None, "base")
    assert isinstance(run, RunInstruction)
    assert (run.argv, run.env) == (("/bin/sh", "-c", "x"), {})
    other = planned(context, store, text.replace("RUN make", "RUN make it"))
    assert other.name != plan.name


def test_here_documents(context: Path, store: ImageStore) -> None:
    text = """FROM base
ARG A=1
RUN <<EOF
# not a comment
echo $A \\
EOF
RUN <<-'EOF' cat > x && grep '<<NOT' x
\tkept
\tEOF
RUN <<PY
#!/usr/bin/env python3
print("x")
PY
COPY <<one <<"two" a.txt /in/
$A \\$A "${A}"
one
$A
two
RUN echo "a <<b c"
"""
    first, second, third, one, two, files, last = planned(context, store, text).steps
    assert isinstance(first, RunInstruction)
    assert first.argv[-1] == "# not a comment\necho $A \\\n"
    assert isinstance(second, RunInstruction)
    assert second.argv[-1] == "<<-'EOF' cat > x && grep '<<NOT' x\n\tkept\n\tEOF"
    assert isinstance(third, RunInstruction)
    assert third.argv[-1] == "/usr/bin/env python3 /dev/fd/3 3<<'PY'\n#!/usr/bin/env python3\nprint(\"x\")\nPY\n"
    assert (one, two) == (
        WriteFile(line=14, name="one", text='1 $A "1"\n', target="/in", into=True),
        WriteFile(line=14, name="two", text="$A\n", target="/in", into=True),
    )
    assert isinstance(files, Copy)
    assert files.into
    assert isinstance(last, RunInstruction)
    assert last.line == 19


def test_the_shell_and_the_check_of_an_image(context: Path, store: ImageStore) -> None:
    text = """FROM --platform=$TARGETPLATFORM base
ARG TARGETARCH
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN a | b
ENTRYPOINT ["/bin/bash", "-lc"]
ENTRYPOINT []
VOLUME /data
COPY --chown=app:app a.txt /
HEALTHCHECK --interval=1m30s --timeout=500ms --retries=7 CMD ["test", "-e", "it's"]
"""
    plan = planned(context, store, text)
    run = plan.steps[0]
    assert isinstance(run, RunInstruction)
    assert run.argv == ("/bin/bash", "-o", "pipefail", "-c", "a | b")
    assert run.env["TARGETARCH"]
    assert plan.health == Health(command="""'test' '-e' 'it'"'"'s'""", interval=90, timeout=0.5, retries=7)
    assert planned(context, store, text + "HEALTHCHECK NONE\n").health is None
    assert planned(context, store, "FROM base\nHEALTHCHECK CMD x\n").health == Health(command="x")


def test_a_pinned_digest_is_that_of_the_image_or_refused(context: Path, store: ImageStore, tmp_path: Path) -> None:
    [own] = {image.digest for image in store.images().values()}
    other = f"sha256:{'0' * 64}"
    assert planned(context, store, f"FROM base:1@{own}\n").base.name == "base"
    with pytest.raises(
        InvalidField, match=f"line 1: the image 'base' of this machine is not known to be {other}"
    ) as no:
        planned(context, store, f"FROM base:latest@{other}\n")
    assert f"outrider image pull base:latest@{other} base:latest@{other} (which checks the digest)" in str(
        no.value.hint
    )
    with pytest.raises(InvalidField, match=r"there is no image 'docker\.io/library/x:1@sha256:0") as no:
        planned(context, store, f"FROM docker.io/library/x:1@{other}\n")
    assert f"pull docker.io/library/x:1@{other} x:1@{other}, or" in str(no.value.hint)
    archive = as_tar(oci_files(), tmp_path / "y.tar")
    with pytest.raises(InvalidField, match=f"the archive has {own}, and the name says {other}"):
        store.import_(archive, f"base@{other}")
    store.import_(archive, f"base@{own}")
    store.import_(archive, f"base@{other}", pulled=True)  # the digest of an index, which is in no archive
    assert planned(context, store, f"FROM docker.io/library/base:latest@{other}\n").base.name == f"base@{other}"


def test_the_folder_of_the_task_as_the_context(store: ImageStore, tmp_path: Path) -> None:
    task = tmp_path / "task"
    for name in ("environment/data/x", "shared/y", "tests/test.sh", "solution/solve.sh", "task.toml"):
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).touch()
    context = task / "environment"
    for word, path in (
        ("environment/data", "environment/data"),
        ("data", "environment/data"),
        ("shared/*", "shared/y"),
    ):
        [step] = planned(context, store, f"FROM base\nCOPY {word} /\n").steps
        assert isinstance(step, Copy)
        assert step.sources == ((task / path).resolve(),)
    (task / "way").symlink_to("tests")
    for word in ("tests/", "solution/solve.sh", "task.toml", "way/test.sh", "sol*/solve.sh"):
        with pytest.raises(InvalidField, match=r"line 2: .* would show the agent files") as refused:
            planned(context, store, f"FROM base\nCOPY {word} /\n")
        assert "Harbor builds" in str(refused.value.hint)
    (task / "task.toml").unlink()
    with pytest.raises(InvalidField, match="there is no file or folder"):
        planned(context, store, "FROM base\nCOPY shared /\n")


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


@pytest.mark.deep
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
    planned(context, store, "FROM base\nADD bomb.gz /\n")  # the file is not an archive, so it is copied unchanged
