"""Images built from Dockerfiles, in real sandboxes with a small root."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from cli.test_examples import needs_namespaces
from outrider.cli import main
from outrider.errors import InvalidField, RuntimeUnavailable
from outrider.sandbox.image_build import build_image
from outrider.sandbox.rootfs.owners import Owners, unpacked
from outrider.sandbox.rootfs.store import ImageStore, RootImage
from outrider.sandbox.rootfs.unpack import BadImage
from outrider.sandbox.runtimes.node_host import ID_FILES
from support.small_root import small_root

pytestmark = needs_namespaces


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The test's own folder for temporary files. Its path is short, because the path of a Unix socket must be short."""
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.fixture
def store(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    """An image store with the image `small`."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    with tarfile.open(tmp_path / "small.tar", "w") as archive:
        archive.add(small_root(tmp_path / "small"), arcname=".")
    store = ImageStore()
    store.import_(tmp_path / "small.tar", "small")
    return store


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "in.txt").write_text("hello\n")
    (folder / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "sub" / "run.sh").chmod(0o755)
    (folder / "sub" / "deep" / "link").symlink_to("../run.sh")
    return folder


def written(context: Path, text: str) -> Path:
    (context / "Dockerfile").write_text(text)
    return context


STEPS = """FROM small
ARG WHO=world
ENV GREETING="hello $WHO"
WORKDIR /app
COPY in.txt .
COPY sub /opt/tools/
COPY in.txt /etc
RUN /opt/tools/deep/link > ran && echo "$GREETING, $WHO" > said && \\
    rm -rf /home /etc/group /bin/seq && mkdir /home && echo kept > /home/new && echo x >> /etc/passwd && echo t > /tmp/t
RUN ["touch", "$GREETING"]
COPY --chmod=700 in.txt /bin/tool
"""


@pytest.mark.deep
def test_an_image_is_what_its_steps_left(store: ImageStore, context: Path) -> None:
    base = store.root(store.image("small"))
    before = (base / "etc/passwd").read_bytes()
    notes: list[str] = []
    image = build_image(written(context, STEPS), store, name="mine", note=notes.append)
    assert notes[-1].endswith("line 11: step 7 of 7")
    root = store.root(image)
    assert (image.env, image.workdir) == ({"GREETING": "hello world"}, "/app")
    assert (root / "app/ran").read_text() == "ran\n"
    assert (root / "app/said").read_text() == "hello world, world\n"
    assert (root / "app/$GREETING").exists()
    assert (root / "app/in.txt").read_text() == (root / "etc/in.txt").read_text() == "hello\n"
    assert [path.name for path in (root / "home").iterdir()] == ["new"]
    assert not (root / "etc/group").exists()
    assert not (root / "usr/bin/seq").exists()
    assert (root / "usr/bin/tool").stat().st_mode & 0o777 == 0o700
    assert (root / "tmp/t").read_text() == "t\n"
    assert not (root / "run/outrider-python").exists()
    assert not list(root.rglob(".wh.*"))
    # The base is unchanged, although the image shares files with it.
    assert (base / "etc/passwd").read_bytes() == before
    assert (base / "usr/bin/seq").exists()
    assert (root / "usr/bin/cat").stat().st_ino == (base / "usr/bin/cat").stat().st_ino


def reserve_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    """Make the machine appear to have ids for several users if `many` is true, and none otherwise. This changes the
    default of all hosts, because a build creates its own host."""
    ranges = tmp_path / "ranges"
    ranges.write_text(f"{os.getuid()}:700000:65536\n" if many else "")
    for kind in ID_FILES:
        monkeypatch.setitem(ID_FILES, kind, ranges)
    if many and os.geteuid() != 0:
        pytest.skip("other users need newuidmap, and ranges of the machine's own")


@pytest.mark.deep
@pytest.mark.parametrize("many", [True, False])
def test_copies_have_the_owner_that_a_step_names(
    store: ImageStore, context: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    reserve_ids(tmp_path, monkeypatch, many)
    shutil.copy(shutil.which("chown") or "", context / "chown")
    text = """FROM small AS first
COPY chown /bin/
COPY --chown=5:6 sub /there/sub
FROM first
RUN mkdir /old && echo x > /old/mine && echo 'db:x:7:8::/:/bin/sh' >> /etc/passwd
ARG WHO=9
COPY --chown=$WHO sub /new
COPY --chown=db in.txt sub/run.sh /old/
COPY --from=first --chown=10:11 /there/sub /from
COPY --chown=root in.txt /plain
COPY --chown=12:13 <<EOF /written
text
EOF
"""
    if not many:
        with pytest.raises(BadImage, match="line 3: chown -h 5:6") as refused:
            build_image(written(context, text), store)
        assert NO_IDS in (refused.value.hint or "")
        return
    image = build_image(written(context, text), store)
    inner = ("", "/run.sh", "/deep", "/deep/link")
    assert owners_of(store, image) == {
        **{f"there/sub{path}": (5, 6) for path in inner},
        **{f"new{path}": (9, 9) for path in inner},
        **{f"from{path}": (10, 11) for path in inner},
        **dict.fromkeys(("old/in.txt", "old/run.sh"), (7, 8)),
        "written": (12, 13),
    }


def owners_of(store: ImageStore, image: RootImage) -> Owners:
    file = store.owners_file(image)
    return {} if file is None else unpacked(file.read_bytes())


NO_IDS = "as root: usermod --add-subuids 100000-165535"


@pytest.mark.deep
@pytest.mark.parametrize("many", [True, False])
def test_files_of_other_users(
    store: ImageStore, context: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    """A step may give files to another user if this machine has ids for other users. An image built on this image keeps
    the owners, except for files that a step removes or gives back to root."""
    reserve_ids(tmp_path, monkeypatch, many)
    shutil.copy(shutil.which("chown") or "", context / "chown")
    steps = "echo x > /home/theirs && mkdir /home/gone /home/db && touch /home/again /home/gone/x && chown 5:43 /home/*"
    steps += " /home/gone/x && chmod 2755 /home/theirs"
    text = f"FROM small\nCOPY chown /bin/\nRUN {steps}\n"
    if not many:
        with pytest.raises(BadImage, match="exited with 1") as refused:
            build_image(written(context, text), store)
        assert NO_IDS in (refused.value.hint or "")
        return
    built = build_image(written(context, text), store, name="lower")
    theirs = store.root(built) / "home/theirs"
    assert (theirs.stat().st_uid, theirs.stat().st_mode & 0o7777) == (os.getuid(), 0o755)
    assert built.owners.foreign == "/home/again of a user (id 5)"
    assert owners_of(store, built) == dict.fromkeys(
        ("home/again", "home/db", "home/gone", "home/gone/x", "home/theirs"), (5, 43)
    )
    more = "FROM lower\nRUN chown 0:0 /home/again && rm -r /home/gone && echo x > /home/db/mine\n"
    upper = build_image(written(context, more), store)
    assert owners_of(store, upper) == {"home/db": (5, 43), "home/theirs": (5, 43)}
    reserve_ids(tmp_path, monkeypatch, False)  # with one user, the step would give /home/db to root
    with pytest.raises(RuntimeUnavailable, match="'lower' has /home/again of a user"):
        build_image(written(context, "FROM lower\nRUN echo x > /home/db/more\n"), store)


STAGES = """FROM small AS first
WORKDIR /out
COPY . /out/
RUN <<'EOF'
mkdir -p deep/er && echo made > deep/er/file && ln -s er/file deep/inner && ln -s /out/in.txt deep/outer
ln -s /out/deep /way
EOF
FROM first AS second
RUN echo second > /out/second
FROM small
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY --from=first /way /all
COPY --from=1 /out/second /out/deep/outer /files/
COPY --from=small --chmod=600 /etc/passwd /own
COPY <<HELLO /in/hello
$PATH is $HOME
HELLO
COPY . /context
RUN if false | true; then exit 1; fi && test -s $APT_CONFIG
"""


@pytest.mark.deep
def test_the_files_of_other_stages(store: ImageStore, context: Path) -> None:
    (context / ".dockerignore").write_text("sub/deep\n**/*.log\nDockerfile\n.dockerignore\n")
    (context / "noise.log").touch()
    root = store.root(build_image(written(context, STAGES), store, name="mine"))
    assert (root / "all/er/file").read_text() == "made\n"
    assert (root / "all/inner").readlink() == Path("er/file")
    assert (root / "all/outer").readlink() == Path("/out/in.txt")
    assert (root / "files/second").read_text() == "second\n"
    assert (root / "files/outer").read_text() == "hello\n"
    assert (root / "own").stat().st_mode & 0o777 == 0o600
    assert (root / "in/hello").read_text().endswith(" is \n")
    assert sorted(str(path.relative_to(root / "context")) for path in (root / "context").rglob("*")) == [
        *("in.txt", "sub", "sub/run.sh"),
    ]
    assert not (root / "out").exists()
    assert list((root / "run").iterdir()) == []


@pytest.mark.deep
def test_a_run_reaches_the_hosts_that_are_named(store: ImageStore, context: Path) -> None:
    """A server on this machine stands for a package index. The sandbox reaches the server only through the proxy."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(context)))
    Thread(target=server.serve_forever, daemon=True).start()
    host = f"127.0.0.1:{server.server_address[1]}"
    get = f"exec 3<>/dev/tcp/${{proxy%:*}}/${{proxy#*:}}; printf 'GET http://{host}/in.txt HTTP/1.0\\r\\n\\r\\n' >&3"
    text = f'FROM small\nSHELL ["/bin/bash", "-c"]\n\nRUN proxy=${{http_proxy#http://}}; {get}; grep hello <&3 > /got\n'
    try:
        with pytest.raises(BadImage, match=r"Dockerfile, line 4: RUN .* exited with 1") as refused:
            build_image(written(context, text), store)
        assert f"outrider image build {context} --allow-host {host}; or" in str(refused.value.hint)
        root = store.root(build_image(written(context, text), store, hosts=[host]))
    finally:
        server.shutdown()
        server.server_close()
    assert (root / "got").read_text() == "hello\n"


@pytest.mark.deep
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("COPY --from=small /nowhere /x", "that image has no /nowhere"),
        ("COPY --from=small /loop* /x", "that image has no /loop"),
        ("COPY --from=small --chmod=700 /etc /x", "--chmod is supported for files only"),
    ],
)
def test_what_another_image_does_not_have(store: ImageStore, context: Path, line: str, says: str) -> None:
    with pytest.raises(BadImage, match=f"Dockerfile, line 2: .*{says}"):
        build_image(written(context, f"FROM small\n{line}\n"), store)


@pytest.mark.deep
def test_the_same_is_built_once(store: ImageStore, context: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "FROM small\nRUN cat /proc/sys/kernel/random/uuid > /id\n"
    folder = written(context, text)
    first = build_image(folder, store)
    began = time.monotonic()
    assert build_image(folder, store, name="again") == store.image("again") == first
    assert time.monotonic() - began < 0.5
    assert main(["image", "build", str(folder), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["image"]["digest"] == first.digest
    assert row["name"] in store.names()
    (folder / "in.txt").write_text("not copied")
    assert build_image(folder, store) == first
    other = build_image(written(context, text + "COPY in.txt /\n"), store)
    assert (store.root(other) / "id").read_text() != (store.root(first) / "id").read_text()
    derived = build_image(written(context, "FROM again\nRUN rm /id && echo 2 > /second\n"), store)
    assert (store.root(derived) / "second").exists()
    assert not (store.root(derived) / "id").exists()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("RUN echo out; echo err >&2; exit 7", "exited with 7"),
        ("RUN (setsid sleep 600 &) ; sleep 600", "took over 1 s"),
        ("RUN nosuch", "exited with 127"),
        ('RUN ["nosuch"]', "nosuch"),
        ("COPY in.txt /etc/passwd/x", "/etc/passwd"),
        ("WORKDIR /etc/passwd/x", "mkdir"),
    ],
)
def test_a_step_that_fails_is_named_and_leaves_nothing(
    store: ImageStore, context: Path, temporary: Path, line: str, says: str
) -> None:
    names = store.names()
    folder = written(context, f"FROM small\nRUN true\n\n{line}\n")
    with pytest.raises(BadImage, match=rf"Dockerfile, line 4: .*{says}") as raised:
        build_image(folder, store, name="mine", seconds=1)
    if "echo out" in line:
        assert raised.value.log_tail == "out\nerr"
    assert store.names() == names
    images = store.root(store.image("small")).parent.parent
    assert [path.name for path in images.glob(".draft-*")] == []
    assert list(temporary.iterdir()) == []


@pytest.mark.deep
def test_a_base_that_is_replaced_meanwhile(store: ImageStore, context: Path) -> None:
    other = build_image(written(context, "FROM small\nRUN echo > /other\n"), store)

    def replace(_: str) -> None:
        store.give("small", other.digest)

    folder = written(context, "FROM small\nRUN true\n")
    with pytest.raises(BadImage, match="the image 'small' was replaced during the build"):
        build_image(folder, store, name="mine", note=replace)
    assert "mine" not in store.names()
    assert (store.root(build_image(folder, store, name="mine")) / "other").exists()


@pytest.mark.deep
def test_a_build_sees_neither_the_host_nor_a_network(store: ImageStore, context: Path) -> None:
    secret = context.parent / "secret"
    secret.write_text("the host's")
    build_image(written(context, f"FROM small\nRUN test ! -e {secret} && test ! -e {context}\n"), store)
    seen = "FROM small\nRUN while read -r name rest; do echo $name; done < /proc/net/dev > /devices\n"
    root = store.root(build_image(written(context, seen), store))
    assert (root / "devices").read_text().splitlines()[2:] == ["lo:"]
    assert not (root / "proc/version").exists()


@pytest.mark.deep
def test_the_tasks_of_a_folder(store: ImageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a", "RUN echo a > /x"), ("b/c", "RUN echo b > /x"), ("d", "RUN echo a > /x")):
        folder = tmp_path / "tasks" / name / "environment"
        folder.mkdir(parents=True)
        written(folder, f"FROM small\n{text}\n")
    assert main(["image", "build", str(tmp_path / "tasks"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["images"]
    assert [Path(row["path"], "x").read_text() for row in rows] == ["a\n", "b\n", "a\n"]
    assert rows[0] == rows[2]
    assert main(["image", "build", str(tmp_path / "tasks"), "mine"]) == 2
    assert "there are 3 Dockerfiles" in capsys.readouterr().err
    (tmp_path / "nothing").mkdir()
    assert main(["image", "build", str(tmp_path / "nothing")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_the_image_of_a_recipe_needs_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", "build", str(tmp_path / "x.toml")]) == 2
    assert "needs a name" in capsys.readouterr().err


@pytest.mark.deep
def test_a_name_that_no_image_can_have(store: ImageStore, context: Path) -> None:
    with pytest.raises(InvalidField, match="not a valid name for an image"):
        build_image(written(context, "FROM small"), store, name="../x")
    with pytest.raises(InvalidField, match="has a digest"):
        build_image(written(context, "FROM small"), store, name=f"x@sha256:{'0' * 64}")
