"""The memory runtime: its small shell, its ledger, and its failures on demand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.errors import RuntimeFailure
from outrider.lab.fakes.memory_runtime.files import MemoryFiles
from outrider.lab.fakes.memory_runtime.runtime import FAIL_VARIABLE, MemoryLedger, MemoryRuntime
from outrider.lab.fakes.memory_runtime.shell import MemoryShell
from outrider.sandbox.runtimes.base import NoShell, SandboxContext
from outrider.spec import RuntimeSpec

from .world import World


@pytest.mark.parametrize(
    ("text", "code", "out"),
    [
        ("echo a  b 'c  d' \"e $X\" '$X' $X$X ${X}y $NONE", 0, "a b c  d e 1 $X 11 1y\n"),
        ('echo \\$X "\\$X" "a\\"b"', 0, '$X $X a"b\n'),
        ("false && echo no || echo yes; true || echo no", 0, "yes\n"),
        ("echo one > f; echo two >> f; cat f", 0, "one\ntwo\n"),
        ("cat none > f 2>&1; cat f", 0, "cat: none: No such file or directory\n"),
        ("cat none 2>/dev/null", 1, ""),
        ("echo lost >&2 2>/dev/null; echo $?", 0, "lost\n0\n"),
        ("Y=5; Z=$Y-$Y; echo $Z; export W=7; echo $W", 0, "5-5\n7\n"),
        ("mkdir -p a/b && cd a && pwd && ls && [ -d b ] && test ! -e c", 0, "/a\nb\n"),
        ("mkdir a; mkdir a", 1, "mkdir: cannot create directory 'a': File exists\n"),
        ("mkdir a; rm a", 1, "rm: cannot remove 'a': Is a directory\n"),
        ("mkdir a; rm -rf a b; cd a", 1, "cd: /a: No such file or directory\n"),
        ("test a = a && test a != b && test -f no || echo all", 0, "all\n"),
        ("bash -c 'echo inner; exit 3'; echo $?", 0, "inner\n3\n"),
        ("exit 9; echo no", 9, ""),
        ("\n\n  ", 0, ""),
        ("&& echo x", 2, "bash: syntax error near unexpected token `&&'\n"),
        ("echo 'open", 2, "bash: unexpected EOF while looking for matching `''\n"),
        ("echo >", 2, "bash: syntax error near unexpected token `newline'\n"),
        ("frobnicate x", 127, "bash: frobnicate: command not found\n"),
        ("echo x > no/such", 1, "bash: /no/such: No such file or directory\n"),
        # Features of bash that the small shell does not have. Unsupported syntax is refused before anything runs.
        ("echo x | cat", 2, "bash: syntax error near unexpected token `|'\n"),
        ("echo $(pwd)", 2, "bash: syntax error near unexpected token `('\n"),
        ("sleep; test a -nt b", 2, "sleep: bad arguments\nbash: test: not known here: a -nt b\n"),
    ],
)
async def test_small_shell(text: str, code: int, out: str) -> None:
    shell = MemoryShell(MemoryFiles(), {"X": "1"}, "/", merged=True)
    assert (await shell.run(text), shell.out.decode()) == (code, out)


def test_no_folder_is_made_below_a_file() -> None:
    files = MemoryFiles()
    files.write("/tmp/a", b"")
    with pytest.raises(FileExistsError):
        files.make_folder("/tmp/a/b/c")
    assert files.below("/tmp") == ["/tmp/a"]


async def test_failures_on_demand(world: World) -> None:
    sandbox = world.create("memory", env={FAIL_VARIABLE: "start"})
    with pytest.raises(RuntimeFailure, match="told to"):
        await sandbox.start()
    sandbox = await world.start("memory", env={FAIL_VARIABLE: "exec,write,shell,read"})
    calls: list[Callable[[], object]] = [
        lambda: sandbox.exec("true", seconds=1),
        lambda: sandbox.write("x", b""),
        lambda: sandbox.open_shell(),
        lambda: sandbox.read("x"),
    ]
    for call in calls:
        with pytest.raises(RuntimeFailure, match="told to"):
            await call()  # type: ignore[misc]  # any of several calls


async def test_ledger_counts_every_start_and_stop_once(world: World) -> None:
    ledger = MemoryLedger()
    cls = MemoryRuntime.with_ledger(ledger)
    made = []
    for number in range(3):
        context = SandboxContext(
            session_id=f"s{number}",
            attempt=1,
            directory=world.folder,
            host=world.host,
            gateway_url=world.url,
            gateway_socket=world.socket,
        )
        made.append(cls.create(RuntimeSpec(kind="memory"), context))
    for runtime in made:
        await runtime.start()
    assert [ledger.balanced] == [False]  # in a list, because mypy would expect the value to stay the same
    for runtime in [*made, *made]:
        await runtime.stop()
    assert ledger.balanced
    assert set(ledger.stopped.values()) == {1}
    assert MemoryRuntime.ledger is None


async def test_it_says_that_it_has_no_python(world: World) -> None:
    sandbox = await world.start("memory")
    for kind in ("python", "ipython"):
        with pytest.raises(NoShell, match="Python in the sandbox") as refused:
            await sandbox.open_shell(kind)
        assert "process" in (refused.value.hint or "")
