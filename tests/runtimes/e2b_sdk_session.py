"""A session of E2B's own SDK, run by `test_e2b.py` in an interpreter that has the package `e2b`."""

from __future__ import annotations

import sys

from e2b import CommandExitException, NotFoundException, Sandbox, SandboxException, SandboxQuery  # type: ignore[import-not-found]  # in an interpreter of its own

box = Sandbox.create("base", timeout=60, metadata={"who": "sdk"}, envs={"X": "1 2"})
done = box.commands.run("echo hi $X; echo err >&2")
assert (done.stdout, done.stderr, done.exit_code) == ("hi 1 2\n", "err\n", 0)
try:
    box.commands.run("exit 3")
    code = 0
except CommandExitException as error:
    code = error.exit_code
assert code == 3

box.files.write("/tmp/a/b.txt", "héllo")
assert box.files.read("/tmp/a/b.txt") == "héllo"
assert (box.files.exists("/tmp/a/b.txt"), box.files.exists("/nope")) == (True, False)
assert [entry.name for entry in box.files.list("/tmp/a")] == ["b.txt"]
assert box.files.get_info("/tmp/a/b.txt").size == 6
big = bytes(range(256)) * 8000
box.files.write("/tmp/big", big)
assert bytes(box.files.read("/tmp/big", format="bytes")) == big
box.files.make_dir("/tmp/d")
box.files.rename("/tmp/a/b.txt", "/tmp/d/c")
box.files.remove("/tmp/d/c")
assert not box.files.exists("/tmp/d/c")
try:
    box.files.read("/nope")
except NotFoundException:
    pass
else:
    raise AssertionError("read a file that is not there")

cat = box.commands.run("cat", background=True, stdin=True)
box.commands.send_stdin(cat.pid, "line\n")
box.commands.close_stdin(cat.pid)
assert cat.wait().stdout == "line\n"
sleep = box.commands.run("sleep 100", background=True)
assert sleep.pid in [process.pid for process in box.commands.list()]
assert box.commands.kill(sleep.pid)
late = box.commands.run("sleep 1; echo late", background=True)
assert box.commands.connect(late.pid).wait().stdout == "late\n"

assert box.is_running()
assert box.get_info().metadata == {"who": "sdk"}
box.set_timeout(100)
(listed,) = Sandbox.list(query=SandboxQuery(metadata={"who": "sdk"})).next_items()
assert listed.sandbox_id == box.sandbox_id
assert Sandbox.connect(box.sandbox_id).commands.run("wc -c < /tmp/big").stdout.strip() == str(len(big))
assert (box.kill(), box.kill()) == (True, False)
try:
    box.commands.run("true")
except SandboxException:
    pass
else:
    raise AssertionError("a command in a sandbox that is gone")
sys.stdout.write("all as expected\n")
