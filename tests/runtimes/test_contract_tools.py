"""The tools that every runtime has: live IPython, rich results, glob, patch, merged output."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.pythons.ipython import ipython_mounts
from outrider.sandbox.runtimes.base import MAX_OUTPUT, PatchConflict, Runtime

from .test_contract import ALL, REAL, alive
from .world import World

pytestmark = pytest.mark.timeout(180)

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
RICH = f"""
import json
class Chart:
    def __repr__(self): return 'a chart'
    def _repr_html_(self): return '<b>chart</b>'
    def _repr_png_(self): return {PIXEL!r}
    def _repr_json_(self): return {{'points': [1, 2]}}
chart = Chart()
"""


@pytest.fixture(scope="module")
def mounts(ipython_home: Path) -> Iterator[tuple[Path, ...]]:
    """The mounts with the service's own IPython, in a cache of the tests."""
    pytest.importorskip("IPython")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_HOME", os.environ.get("SANDBOX_CACHE") or str(ipython_home))
        yield ipython_mounts()


@pytest.fixture(params=ALL)
async def sandbox(request: pytest.FixtureRequest, world: World) -> Runtime:
    return await world.start(request.param)


@pytest.fixture(params=REAL)
async def real(request: pytest.FixtureRequest, world: World) -> Runtime:
    return await world.start(request.param)


@pytest.fixture(params=REAL)
async def with_ipython(request: pytest.FixtureRequest, world: World, mounts: tuple[Path, ...]) -> Runtime:
    return await world.start(request.param, mounts=mounts)


@pytest.mark.deep
async def test_merged_output_is_in_order(sandbox: Runtime) -> None:
    result = await sandbox.exec("echo a; echo b >&2; echo c", merged=True, seconds=10)
    assert (result.stdout, result.stderr) == (b"a\nb\nc\n", b"")


# IPython.


@pytest.mark.deep
async def test_ipython_keeps_state_and_echoes(with_ipython: Runtime) -> None:
    shell = await with_ipython.open_shell("ipython")
    assert (await shell.run("x = 20\nprint('hi')\nx + 1", seconds=30)).output == "hi\n21\n"
    assert (await shell.run("x", seconds=30)).output == "20\n"
    assert (await shell.run("'text'", seconds=30)).output == "'text'\n"
    assert (await shell.run("None", seconds=30)).output == ""
    failed = await shell.run("def f():\n    return 1 / 0\nf()", seconds=30)
    assert failed.exit_code == 1
    assert "ZeroDivisionError: division by zero" in failed.output
    assert "\x1b" not in failed.output
    assert (await shell.run("if", seconds=30)).exit_code == 1
    assert (await shell.run("while True: pass", seconds=0.3)).timed_out
    assert (await shell.run("x", seconds=30)).output == "20\n"
    await shell.close()


async def test_rich_results(with_ipython: Runtime) -> None:
    shell = await with_ipython.open_shell("ipython")
    assert (await shell.run(RICH, seconds=30)).displays == ()
    shown = await shell.run("display(chart)\nprint('between')\nchart", seconds=30)
    assert shown.output == "a chart\nbetween\na chart\n"
    assert len(shown.displays) == 2
    for display in shown.displays:
        assert set(display.data) >= {"text/plain", "text/html", "image/png"}
        assert display.data["text/html"] == "<b>chart</b>"
        assert display.data["image/png"] == PIXEL
        assert json.loads(display.data.get("application/json", '{"points": [1, 2]}')) == {"points": [1, 2]}
    assert (await shell.run("1", seconds=30)).displays == ()
    plain = await with_ipython.open_shell("python")
    assert (await plain.run(RICH + "\nchart", seconds=30)).displays == ()


async def test_magics_and_commands(with_ipython: Runtime) -> None:
    shell = await with_ipython.open_shell("ipython")
    assert (await shell.run("!echo from the shell", seconds=30)).output == "from the shell\n"
    assert (await shell.run("found = !echo one; echo two\nfound[1]", seconds=30)).output == "'two'\n"
    assert (await shell.run("%%bash\nexit 0", seconds=30)).exit_code == 0
    assert (await shell.run("%cd -q /\n%pwd", seconds=30)).output == "'/'\n"
    assert (await shell.run("pwd", seconds=30)).output == "'/'\n"
    assert "Wall time" in (await shell.run("%time 1", seconds=30)).output
    assert "UsageError" in (await shell.run("%no_such_magic", seconds=30)).output
    assert (await shell.run("print('!not a command', 5 % 3)", seconds=30)).output == "!not a command 2\n"
    assert (await shell.run("7;", seconds=30)).output == ""


async def test_ipython_waits_exits_and_forgets_nothing(with_ipython: Runtime) -> None:
    shell = await with_ipython.open_shell("ipython")
    awaited = "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 5\nawait f()"
    assert (await shell.run(awaited, seconds=30)).output == "5\n"
    assert (await shell.run("exit(3)", seconds=30)).exit_code == 3
    assert (await shell.run("exit", seconds=30)).exit_code == 0
    assert (await shell.run("raise SystemExit('why')", seconds=30)).output == "why\n"
    assert (await shell.run("6 * 7\n", seconds=30)).output == "42\n"
    assert (await shell.run("_ + 1", seconds=30)).output == "43\n"
    assert (await shell.run("f.__name__", seconds=30)).output == "'f'\n"
    left = await with_ipython.exec("ls -A ~/.ipython ~/.cache 2>/dev/null", seconds=30)
    assert left.stdout == b""


@pytest.mark.deep
async def test_ipython_is_interrupted_with_its_children(with_ipython: Runtime) -> None:
    shell = await with_ipython.open_shell("ipython")
    late = await shell.run("!sleep 3010", seconds=0.5)
    assert late.timed_out
    late = await shell.run("print('begun')\nimport time\ntime.sleep(60)", seconds=2)
    assert late.timed_out
    assert late.output.startswith("begun\n")
    assert "KeyboardInterrupt" in late.output
    assert (await shell.run("1 + 1", seconds=30)).output == "2\n"
    assert not await alive(with_ipython, "3010")


async def test_a_display_that_is_too_large_is_left_out(with_ipython: Runtime) -> None:
    shell = await with_ipython.open_shell("ipython")
    text = "display({'text/html': 'x' * (9 << 20)}, raw=True)\ndisplay({'text/html': 'y'}, raw=True)"
    displays = (await shell.run(text, seconds=60)).displays
    assert [display.data for display in displays] == [
        {"text/plain": "[text/html of 9437184 bytes left out]"},
        {"text/html": "y"},
    ]


@pytest.mark.deep
async def test_displays_of_few_characters_but_many_bytes_do_not_cost_the_shell(with_ipython: Runtime) -> None:
    shell = await with_ipython.open_shell("ipython")
    large = "state = 1\ndisplay({'text/html': chr(0x1F600) * (5 << 20)}, raw=True)"
    displays = (await shell.run(large, seconds=60)).displays
    assert [display.data for display in displays] == [{"text/plain": "[text/html of 20971520 bytes left out]"}]
    many = "for _ in range(1001):\n    display({f'x/{n}': 'x' for n in range(100)}, raw=True)"
    displays = (await shell.run(many, seconds=60)).displays
    assert (len(displays), len(displays[0].data)) == (1000, 60)
    assert (await shell.run("state", seconds=60)).output == "1\n"


async def test_an_input_that_writes_to_the_result_descriptor(with_ipython: Runtime) -> None:
    shell = await with_ipython.open_shell("ipython")
    broken = await shell.run("import os; os.write(4, b'\\xff' * 100)", seconds=30)
    assert broken.exit_code is None
    assert "started anew" in broken.output
    assert (await shell.run("1 + 1", seconds=60)).output == "2\n"


async def test_much_output_of_an_interpreter(real: Runtime) -> None:
    shell = await real.open_shell("python")
    shown = await shell.run("print('first'); print('x' * (30 << 20)); 'last'", seconds=60)
    assert shown.output.startswith("first\n")
    assert shown.output.endswith("'last'\n")
    assert "bytes cut" in shown.output
    assert len(shown.output) < MAX_OUTPUT + 100
    assert (await shell.run("'z' * 100_000", seconds=30)).output == repr("z" * 100_000) + "\n"


async def test_without_ipython_both_ways_are_named(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    bare = await world.start("process", env={"PATH": "/nowhere"})
    with pytest.raises(RuntimeFailure, match="no IPython in the sandbox") as failure:
        await bare.open_shell("ipython")
    assert "image" in (failure.value.hint or "")
    assert "pip install ipython" in (failure.value.hint or "")


# Paths.


async def test_glob(sandbox: Runtime) -> None:
    for name in ("a.py", "b.txt", "sub/c.py", "sub/deep/d.py", ".hidden/e.py", "sub/.f.py"):
        await sandbox.write(name, b"")
    assert await sandbox.glob("*.py") == ["a.py"]
    assert await sandbox.glob("**/*.py") == ["a.py", "sub/c.py", "sub/deep/d.py"]
    assert await sandbox.glob("/work/sub/*.py") == ["/work/sub/c.py"]
    assert await sandbox.glob("sub/**") == ["sub/c.py", "sub/deep", "sub/deep/d.py"]
    assert await sandbox.glob("[ab].*") == ["a.py", "b.txt"]
    assert await sandbox.glob("?.txt") == ["b.txt"]
    assert await sandbox.glob("*/") == ["sub/"]
    assert await sandbox.glob(".*/*.py") == [".hidden/e.py"]
    assert await sandbox.glob("sub/c.py") == ["sub/c.py"]
    assert await sandbox.glob("none/*") == await sandbox.glob("none") == []
    with pytest.raises(RuntimeFailure, match="more than 2 paths"):
        await sandbox.glob("**/*.py", limit=2)


async def test_glob_ends_where_links_go_round(real: Runtime) -> None:
    await real.exec("mkdir -p a/b; ln -s .. a/up; ln -s /work/a a/b/again; ln -s . here; touch a/x", seconds=30)
    assert await real.glob("**/x") == ["a/x"]
    assert await real.glob("here/*/x") == ["here/a/x"]
    assert await real.glob("a/**") == ["a/b", "a/b/again", "a/up", "a/x"]


# Patches.

EDIT = """diff --git a/one.txt b/one.txt
--- a/one.txt
+++ b/one.txt
@@ -1,3 +1,3 @@
 first
-second
+2nd
 third
diff --git a/gone/old.txt b/gone/old.txt
deleted file mode 100644
--- a/gone/old.txt
+++ /dev/null
@@ -1 +0,0 @@
-bye
diff --git a/from.txt b/to/new name.txt
similarity index 100%
rename from from.txt
rename to to/new name.txt
diff --git a/fresh/file b/fresh/file
new file mode 100644
--- /dev/null
+++ b/fresh/file
@@ -0,0 +1,2 @@
+made
+here
\\ No newline at end of file
"""


async def before(sandbox: Runtime) -> None:
    await sandbox.write("one.txt", b"first\nsecond\nthird\n")
    await sandbox.write("gone/old.txt", b"bye\n")
    await sandbox.write("from.txt", b"kept\n")


async def test_patch(sandbox: Runtime) -> None:
    await before(sandbox)
    await sandbox.patch(EDIT)
    assert await sandbox.read("one.txt") == b"first\n2nd\nthird\n"
    assert await sandbox.read("to/new name.txt") == b"kept\n"
    assert await sandbox.read("fresh/file") == b"made\nhere"
    assert await sandbox.glob("**") == ["fresh", "fresh/file", "one.txt", "to", "to/new name.txt"]


async def test_patch_below_a_folder(sandbox: Runtime) -> None:
    await sandbox.write("sub/x", b"1\n")
    await sandbox.patch(b"--- x\n+++ x\n@@ -1 +1 @@\n-1\n+2\n", cwd="sub")
    assert await sandbox.read("/work/sub/x") == b"2\n"


async def test_a_patch_that_fits_in_part_changes_nothing(sandbox: Runtime) -> None:
    await before(sandbox)
    await sandbox.write("from.txt", b"kept\n")
    await sandbox.write("gone/old.txt", b"something else\n")
    with pytest.raises(PatchConflict, match=r"patch failed: gone/old\.txt:1"):
        await sandbox.patch(EDIT)
    assert await sandbox.read("one.txt") == b"first\nsecond\nthird\n"
    assert await sandbox.glob("**") == ["from.txt", "gone", "gone/old.txt", "one.txt"]


REFUSED = {
    "not a diff": "No valid patches",
    "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n": "x: No such file",
    "--- a/../../etc/passwd\n+++ b/../../etc/passwd\n@@ -0,0 +1 @@\n+x\n": "invalid path",
    "--- /dev/null\n+++ b/d\n@@ -0,0 +1,2 @@\n+x\n": "corrupt patch",
    "diff --git a/p.png b/p.png\nindex 1..2\nGIT binary patch\nliteral 3\n": "corrupt binary patch",
}


async def test_patches_that_are_refused(sandbox: Runtime) -> None:
    await sandbox.exec("mkdir -p d", seconds=30)
    for text, why in REFUSED.items():
        with pytest.raises(PatchConflict, match=why):
            await sandbox.patch(text)
    assert await sandbox.glob("**") == ["d"]


async def test_patch_sets_modes_and_goes_through_no_link(real: Runtime) -> None:
    await real.exec("echo 1 > run; chmod 750 run; mkdir out; ln -s out link; echo 1 > out/x; umask 022", seconds=30)
    await real.patch("--- a/run\n+++ b/run\n@@ -1 +1 @@\n-1\n+2\n")
    made = "diff --git a/s b/s\nnew file mode 100755\n--- /dev/null\n+++ b/s\n@@ -0,0 +1 @@\n+#!/bin/sh\n"
    made += "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+run\n"
    made += "\\ No newline at end of file\n"
    await real.patch(made)
    listed = (await real.exec("stat -c '%a %N' run s l", seconds=30)).stdout.decode()
    assert listed == "755 'run'\n755 's'\n777 'l' -> 'run'\n"
    with pytest.raises(PatchConflict, match="beyond a symbolic link"):
        await real.patch("--- a/link/x\n+++ b/link/x\n@@ -1 +1 @@\n-1\n+2\n")


async def test_without_git_no_patch_is_applied(world: World) -> None:
    bare = await world.start("process", env={"PATH": "/nowhere"})
    with pytest.raises(RuntimeFailure, match="git applies no patch here") as failure:
        await bare.patch(EDIT)
    assert "an image with git" in (failure.value.hint or "")
