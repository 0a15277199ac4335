"""The evaluator `code`: programs that pass, programs that fail, and programs that attack the grading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from outrider.errors import EvaluatorError, InvalidField, RuntimeFailure
from outrider.evaluators.code.cases import json_value
from outrider.evaluators.factory import make_evaluator
from outrider.sandbox.runtimes.base import Runtime, ShellResult
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerShell
from outrider.spec import EvaluatorSpec, Resources
from outrider.trajectory import Verdict

from .bench import PIDS, Bench, a_bench

SUM = "print(sum(int(word) for word in input().split()))\n"
ADD = "def add(a, b):\n    return a + b\n"
TEXTS: dict[str, Any] = {"inputs": ["1 2\n", "40 2\n", "5 6\n"], "outputs": ["3\n", "42\n", "11\n"]}
CALLS: dict[str, Any] = {"fn_name": "add", "inputs": [[1, 2], [40, 2], [5, 6]], "outputs": [3, 42, 11]}
PROMPT = 'from math import floor\n\ndef double(x):\n    return 2 * x\n\ndef add(a, b):\n    """The sum."""\n'
TEST = """
def check(candidate):
    assert candidate(1, 2) == 3
    assert candidate(a=40, b=2) == 42
    assert add(3, 3) == double(3) == candidate(3, 3)
"""
CHECK: dict[str, Any] = {"prompt": PROMPT, "entry_point": "add", "test": TEST}
FORMS: dict[str, dict[str, Any]] = {"texts": TEXTS, "calls": CALLS, "check": CHECK}
GOLD = {"texts": SUM, "calls": ADD, "check": ADD}


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with a_bench() as made:
        yield made


def spec(**options: Any) -> EvaluatorSpec:
    return EvaluatorSpec(kind="code", options=options, seconds=60)


def fenced(program: str) -> str:
    return f"Like this:\n```python\nprint('not this one')\n```\nNo, so:\n```python\n{program}```\nDone."


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["file", "reply"])
async def test_a_right_program_passes(bench: Bench, form: str, place: str) -> None:
    if place == "file":
        await bench.sandbox.write("solution.py", GOLD[form].encode())
        graded = await bench.grade(spec(file="solution.py", **FORMS[form]))
    else:
        graded = await bench.grade(spec(**FORMS[form]), fenced(GOLD[form]))
    metrics = {"passed": 1.0, "cases": 1.0, "calls": 4.0} if form == "check" else {"passed": 3.0, "cases": 3.0}
    assert graded == Verdict(reward=1.0, metrics=metrics)
    assert bench.others == (form == "check") + (place == "reply")


@pytest.mark.deep
async def test_a_completion_goes_on_where_the_prompt_ends(bench: Bench) -> None:
    assert (await bench.grade(spec(**CHECK), fenced("    return floor(a) + b\n"))).reward == 1.0
    assert (await bench.grade(spec(**CHECK), fenced("    return floor(a) - b\n"))).reward == 0.0


async def test_a_share_counts_each_case_and_all_stops_at_the_first(bench: Bench) -> None:
    wrong = fenced("a, b = input().split()\nprint(3 if a == '1' else 11 if a == '5' else 'forty-two')\n")
    share = await bench.grade(spec(reward="share", **TEXTS), wrong)
    assert (share.reward, share.metrics) == (2 / 3, {"passed": 2.0, "cases": 3.0})
    assert share.reason == "case 1 of 3: wrong answer: ['forty-two']"
    whole = await bench.grade(spec(**TEXTS), wrong)
    assert (whole.reward, whole.metrics, whole.reason) == (0.0, {"passed": 1.0, "cases": 3.0}, share.reason)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("given", "output", "program"),
    [
        ("1\n2\n", "a \n\nb\n\n", "print('a\\n\\nb   ')"),
        (["1", "2"], ["1", "2"], "print(input())\nprint(input())"),
        ("x", "\u00e4", "print('\u00e4')"),
    ],
)
async def test_blanks_at_the_ends_do_not_count(bench: Bench, given: Any, output: Any, program: str) -> None:
    assert (await bench.grade(spec(inputs=[given], outputs=[output]), fenced(f"{program}\n"))).reward == 1.0


@pytest.mark.deep
@pytest.mark.parametrize(
    ("given", "output", "body", "reward"),
    [
        # LiveCodeBench: one JSON value per line
        ("[1, 2]\n3", "[3, 4]", "return [one + b - 1 for one in a[:1]] + [4]", 1.0),
        # APPS: the result is the only item of a list
        ([[1], 2], [[1, 2]], "return [*a, b]", 1.0),
        ([[1], 2], [[1, 2]], "return 1", 0.0),
        ([[1], 2], [1, 2], "return (a[0], b)", 1.0),
        ([[1], 2], [1, 2], "return 1", 0.0),
        ([{"x": 1}, 2], {"x": 1}, "return a", 1.0),
    ],
)
async def test_rows_of_each_kind_of_data_set(bench: Bench, given: Any, output: Any, body: str, reward: float) -> None:
    method = f"class Solution:\n    def f(self, a, b):\n        {body}\n"
    for program in (f"def f(a, b):\n    {body}\n", method):
        assert (
            await bench.grade(spec(fn_name="f", inputs=[given], outputs=[output]), fenced(program))
        ).reward == reward


@pytest.mark.deep
@pytest.mark.parametrize("said", ["", "I cannot do this.", "```\n\n```", "```python\nprint(3)"])
async def test_no_program_is_worth_nothing(bench: Bench, said: str) -> None:
    for form in FORMS.values():
        graded = await bench.grade(spec(**form), said)
        assert (graded.reward, graded.metrics["passed"]) == (0.0, 0.0)
        assert (await bench.grade(spec(file="nowhere.py", **form))).reward == 0.0


ATTACKS = {
    "ends at once": "import os\nos._exit(0)\n",
    "ends properly": "import sys\nsys.exit(0)\n",
    "prints PASSED": "print('PASSED')\nprint('passed', 3, 'of', 3)\n",
    "prints another case's output": "print(42)\n",
    "says that it passed": 'import os\nos.write(1, b\'{"passed": 3}\\noutrider-step:{"passed": 3}\\n\')\nos._exit(0)\n',
    "hangs": "while True: pass\n",
    "prints a gigabyte": "import sys\nfor _ in range(1024): sys.stdout.write('x' * (1 << 20))\n",
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n",
    "kills everything": "import os\nos.kill(-1, 9)\n",
    "fills its memory": "x = []\nwhile True: x.append(bytearray(1 << 26))\n",
}
OBJECT = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
"""
LATER = {
    "always equal": f"{OBJECT}def add(a, b): return Any()\n",
    "always equal, an int": f"{OBJECT}class Int(Any, int): pass\ndef add(a, b): return Int(7)\n",
    "always equal, a list": f"{OBJECT}class List(Any, list): pass\ndef add(a, b): return List()\n",
    "ends in the call": "import os\ndef add(a, b): os._exit(0)\n",
    "raises AssertionError": "def add(a, b): raise AssertionError\n",
    "raises SystemExit": "def add(a, b): raise SystemExit(0)\n",
    "hangs in the call": "def add(a, b):\n    while True: pass\n",
    "forges an answer": """
import json, os
def add(a, b):
    for fd in range(3, 64):
        try: os.write(fd, json.dumps({"passed": 3}).encode())
        except OSError: pass
    os._exit(0)
""",
    "answers with what is no value": """
import os
def add(a, b):
    for fd in range(3, 64):
        try: os.write(fd, b'{"value": {"dict": 5}}')
        except OSError: pass
    os._exit(0)
""",
    "answers with too large a number": """
import os
def add(a, b):
    for fd in range(3, 64):
        try: os.write(fd, b'{"value": {"complex": [1%s, 0]}}' % (b"0" * 400))
        except OSError: pass
    os._exit(0)
""",
    "nests deeply": "def add(a, b):\n    x = []\n    for _ in range(900): x = [x]\n    return x\n",
    "looks for the tests": """
import glob, os, re
def add(a, b):
    found = []
    places = [glob.glob(place, recursive=True) for place in ("/proc/[0-9]*/*", "/tmp/**", "/work/**")]
    for name in sum(places, []):
        if name.rsplit("/", 1)[-1] in ("cmdline", "environ", "mem", "fd") or not name.startswith("/proc"):
            try: text = open(name, "rb").read(1 << 20).decode("utf-8", "replace")
            except OSError: continue
            found += re.findall(r"candidate\\(a=40, b=2\\) == (\\d+)", text)
    return int(found[0]) if found else None
""",
}


@pytest.mark.deep
@pytest.mark.parametrize("form", ["texts", "calls", "check"])
async def test_what_a_program_does_instead_earns_nothing(bench: Bench, form: str) -> None:
    for attack, program in (ATTACKS if form == "texts" else ATTACKS | LATER).items():
        options = FORMS[form] | {"case_seconds": 1.5, "total_seconds": 20}
        graded = await bench.grade(spec(**options), fenced(program))
        assert (graded.reward, graded.metrics["passed"]) == (0.0, 0.0), attack
        assert graded.reason, attack
        await bench.renew()


@pytest.mark.deep
async def test_a_share_of_an_attack_is_what_it_answers(bench: Bench) -> None:
    """With the reward `share`, a program that prints the output of one case earns the share of this case. A program
    that kills all processes, and a fork bomb, earn nothing."""
    always = await bench.grade(spec(reward="share", **TEXTS), fenced("print(42)\n"))
    assert (always.reward, always.metrics["passed"]) == (1 / 3, 1.0)
    for program in ("import os\nprint(3, flush=True)\nos.kill(-1, 9)\n", "import os\nwhile True: os.fork()\n"):
        options = TEXTS | {"case_seconds": 1.5}
        assert (await bench.grade(spec(reward="share", **options), fenced(program))).reward == 0.0
        await bench.renew()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("program", "options", "reason"),
    [
        (f"{SUM}raise SystemExit(3)\n", {}, "ended with exit code 3"),
        (f"{SUM}1 / 0\n", {}, "ZeroDivisionError"),
        (SUM, {"output_bytes": 1}, "printed more than 1 bytes"),
        (f"{SUM}import sys, time\nsys.stdout.flush()\ntime.sleep(60)\n", {"case_seconds": 1}, "did not end within 1 s"),
    ],
)
async def test_the_right_output_is_not_enough(bench: Bench, program: str, options: Any, reason: str) -> None:
    graded = await bench.grade(spec(inputs=["5 6"], outputs=["11"], **options), fenced(program))
    assert graded.reward == 0.0
    assert reason in str(graded.reason)


class Breaks:
    """A sandbox that breaks after `commands` commands. `inside` is True if the failure happened inside the sandbox."""

    def __init__(self, sandbox: Runtime, commands: int, *, inside: bool) -> None:
        self._sandbox = sandbox
        self._left = commands
        self._inside = inside

    async def exec(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeFailure("it is gone", inside=self._inside)
        return await self._sandbox.exec(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


COLLIDING = """
import json, os
def add(a, b):
    numbers = [k * (2**61 - 1) for k in range(50_000)]
    for fd in range(3, 64):
        try: os.write(fd, json.dumps({"value": VALUE}).encode())
        except OSError: pass
    os._exit(0)
"""


@pytest.mark.deep
@pytest.mark.timeout(30)
@pytest.mark.parametrize("form", ["calls", "check"])
@pytest.mark.parametrize("value", ['{"set": numbers}', '{"dict": [[k, 0] for k in numbers]}'])
async def test_numbers_with_the_same_hash_hold_up_nothing(bench: Bench, form: str, value: str) -> None:
    """With `calls`, a value that is not of JSON's types is refused and never hashed in this process. With `check`, the
    check's sandbox may build the value, and its time counts as the candidate's."""
    options = FORMS[form] | {"case_seconds": 5, "total_seconds": 6, "output_bytes": 4 << 20}
    graded = await bench.grade(spec(**options), fenced(COLLIDING.replace("VALUE", value)))
    assert graded.reward == 0.0
    said = "no value of JSON's types" if form == "calls" else "did not end in time"
    # On a busy machine the program itself may exceed its time.
    assert said in str(graded.reason) or "did not end within" in str(graded.reason)


@pytest.mark.parametrize(
    ("coded", "value"),
    [
        ([1, {"tuple": ["a", None]}], [1, ["a", None]]),
        ({"dict": [["a", {"tuple": []}], ["b", {"dict": []}]]}, {"a": [], "b": {}}),
    ],
)
def test_what_is_compared_is_of_jsons_types(coded: Any, value: Any) -> None:
    assert json_value(coded) == value


@pytest.mark.parametrize(
    "coded",
    [
        {"set": [1]},
        {"frozenset": []},
        {"bytes": "00"},
        {"complex": [10**400, 0]},
        {"dict": [[1, 2]]},
        {"dict": [[{"tuple": []}, 2]]},
        {"dict": 5},
        {"tuple": 5},
        {"tuple": {"tuple": []}},
        {"list": [], "tuple": []},
        {},
    ],
)
def test_what_is_not_of_jsons_types_is_not_compared(coded: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        json_value(coded)


@pytest.mark.deep
async def test_a_second_sandbox_that_starts_slowly_costs_the_candidate_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = bench.beside

    @asynccontextmanager
    async def slow(resources: Resources | None = None) -> AsyncIterator[Runtime]:
        async with quick(resources) as other:
            await asyncio.sleep(2.5)
            yield other

    monkeypatch.setattr(bench, "beside", slow)
    graded = await bench.grade(spec(**CHECK | {"total_seconds": 2}), fenced(ADD))
    assert (graded.reward, graded.reason) == (1.0, None)


class Hangs:
    """A sandbox in which no command ends, as if python3 hung."""

    def __init__(self, sandbox: Runtime) -> None:
        self._sandbox = sandbox

    async def exec(self, *args: Any, **options: Any) -> Any:
        return await self._sandbox.exec("sleep 60", seconds=0.1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


async def test_a_python_that_hangs_is_the_agents_doing_where_another_one_works(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sandbox = cast(Runtime, Hangs(bench.sandbox))
    with pytest.raises(EvaluatorError, match="does not run in the sandbox") as caught:
        await bench.grade(spec(file="solution.py", **TEXTS))
    assert (caught.value.inside, bench.others) == (True, 1)

    @asynccontextmanager
    async def hanging(resources: Resources | None = None) -> AsyncIterator[Runtime]:
        yield bench.sandbox

    monkeypatch.setattr(bench, "beside", hanging)
    for options, said in (({"file": "solution.py"}, ""), ({}, fenced(SUM))):
        with pytest.raises(EvaluatorError, match="does not run in the sandbox") as caught:
            await bench.grade(spec(**options, **TEXTS), said)
        assert not caught.value.inside


@pytest.mark.parametrize("inside", [True, False])
async def test_a_sandbox_that_breaks_is_the_programs_doing_only_if_it_broke_from_inside(
    bench: Bench, inside: bool
) -> None:
    await bench.sandbox.write("solution.py", SUM.encode())
    bench.sandbox = cast(Runtime, Breaks(bench.sandbox, 2, inside=inside))  # the probe and the first case succeed
    options = spec(file="solution.py", reward="share", **TEXTS)
    if not inside:
        with pytest.raises(RuntimeFailure, match="it is gone"):
            await bench.grade(options)
        return
    graded = await bench.grade(options)
    assert (graded.reward, bench.others) == (1 / 3, 1)
    assert graded.reason == "case 1 of 3: the program broke its sandbox: it is gone"


async def test_each_run_is_logged(bench: Bench) -> None:
    assert (await bench.grade(spec(**TEXTS), fenced("import sys\nprint('no')\nsys.exit('why')\n"))).reward == 0.0
    assert bench.log.startswith(b"[exit code 1 after ")
    assert bench.log.endswith(b" s]\nno\nwhy\n")


class Holds:
    """A sandbox that does not end a program in time, as happens if a fork bomb takes all processor time."""

    def __init__(self, sandbox: Runtime) -> None:
        self._sandbox = sandbox

    async def exec(self, command: Any, **options: Any) -> Any:
        if "solution.py" in command:
            await asyncio.sleep(60)
        return await self._sandbox.exec(command, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


@pytest.mark.parametrize("another", [True, False])
async def test_a_sandbox_that_ends_no_program_is_the_programs_doing_where_another_one_works(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    bench.sandbox = cast(Runtime, Holds(bench.sandbox))
    # Programs that end late get a third of the seconds that remain after `total_seconds`: 0.1 s.
    options = spec(file="solution.py", reward="share", case_seconds=0.2, total_seconds=59.7, **TEXTS)
    if another:
        graded = await bench.grade(options)
        assert (graded.reward, graded.reason) == (0.0, "case 0 of 3: the program could not be ended after 0.2 s")
        return

    def none(resources: Resources | None = None) -> Any:
        raise RuntimeFailure("no sandbox starts")

    monkeypatch.setattr(bench, "beside", none)
    with pytest.raises(RuntimeFailure, match="no sandbox starts"):
        await bench.grade(options)


class Stands:
    """A sandbox of a node that is stopped while a program runs, for longer than the program may take."""

    def __init__(self, sandbox: Runtime, seconds: float) -> None:
        self._sandbox = sandbox
        self._seconds = seconds

    async def exec(self, command: Any, **options: Any) -> Any:
        if "solution.py" in command:
            asyncio.get_running_loop().call_later(0.02, time.sleep, self._seconds)
        return await self._sandbox.exec(command, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


@pytest.mark.deep
async def test_a_node_that_stands_still_costs_the_candidate_nothing(bench: Bench) -> None:
    await bench.sandbox.write("solution.py", SUM.encode())
    bench.sandbox = cast(Runtime, Stands(bench.sandbox, 1.0))
    # The third of the seconds that remain after `total_seconds` is 0.1 s: the node stands still for longer.
    late = spec(file="solution.py", case_seconds=0.5, total_seconds=59.7, **TEXTS)
    graded = await bench.grade(late)
    assert (graded.reward, graded.reason) == (1.0, None)
    graded = await bench.grade(spec(file="solution.py", total_seconds=1.5, **TEXTS))
    assert (graded.reward, graded.reason) == (1.0, None)


@pytest.mark.deep
async def test_a_node_that_stands_still_during_a_check_costs_the_candidate_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ToolServerShell.run

    async def late(shell: ToolServerShell, text: str, *, seconds: float) -> ShellResult:
        asyncio.get_running_loop().call_later(0.01, time.sleep, 0.7)
        return await run(shell, text, seconds=seconds)

    monkeypatch.setattr(ToolServerShell, "run", late)
    graded = await bench.grade(spec(**CHECK | {"total_seconds": 2}), fenced(ADD))
    assert (graded.reward, graded.reason) == (1.0, None)


class Understates:
    """A sandbox that takes half a second longer for each run than it reports, as for the transfer of a long output."""

    def __init__(self, sandbox: Runtime) -> None:
        self._sandbox = sandbox

    async def exec(self, command: Any, **options: Any) -> Any:
        done = await self._sandbox.exec(command, **options)
        await asyncio.sleep(0.5)
        return msgspec.structs.replace(done, seconds=0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


@pytest.mark.parametrize("form", ["texts", "check"])
async def test_seconds_that_a_sandbox_does_not_report_count(bench: Bench, form: str) -> None:
    """A candidate must not exceed `total_seconds` by them, and so make an evaluation fail that gives no reward."""
    await bench.sandbox.write("solution.py", GOLD[form].encode())
    bench.sandbox = cast(Runtime, Understates(bench.sandbox))
    graded = await bench.grade(spec(file="solution.py", **FORMS[form] | {"total_seconds": 0.9}))
    assert graded.reward == 0.0
    assert "no time is left" in str(graded.reason) or "did not end" in str(graded.reason)


COUNTS = """
import os, time
forked = 0
try:
    while os.fork(): forked += 1
    time.sleep(9)
except OSError: print("forked", forked)
"""


async def test_a_program_of_the_reply_has_a_small_sandbox_of_its_own(bench: Bench) -> None:
    """A program in a file of the agent's sandbox has the limits of the agent's sandbox."""
    await bench.sandbox.write("secret", b"x")
    await bench.sandbox.write("solution.py", COUNTS.encode())
    forked = {}
    for place, options, said in (("reply", {}, fenced(COUNTS)), ("file", {"file": "solution.py"}, "")):
        graded = await bench.grade(spec(inputs=[""], outputs=["none"], **options), said)
        forked[place] = int(str(graded.reason).rsplit(" ", 1)[-1].rstrip("']"))
    assert 8 < forked["reply"] < 64 < forked["file"] < PIDS
    look = "import os\nprint(os.path.exists('/work/secret'))\n"
    assert (await bench.grade(spec(inputs=[""], outputs=["False"]), fenced(look))).reward == 1.0


@pytest.mark.parametrize("field", ["carry", "prepare"])
async def test_a_program_of_the_reply_finds_the_files_that_its_task_gives(bench: Bench, field: str) -> None:
    await bench.sandbox.write("given", b"42")
    given = EvaluatorSpec(kind="code", options={"inputs": [""], "outputs": ["42"]}, seconds=60)
    if field == "carry":
        given = given.model_copy(update={"carry": ["given"]})
    else:
        bench.fields["prepare"] = [{"write": "42", "to": "given"}]
    assert (await bench.grade(given, fenced("print(open('/work/given').read())\n"))).reward == 1.0
    assert bench.others == 0


LINGERS = {
    "sleeps for ever": "import time\ntime.sleep(1e6)\n",
    "leaves a child that ignores signals and holds the output": """
import os, signal, time
if os.fork() == 0:
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True: time.sleep(1)
""",
    "leaves a daemon that holds the output": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1e6)
    os._exit(0)
""",
    "fills the disk": "file = open('/work/full', 'wb')\nwhile True: file.write(bytes(1 << 20))\n",
    "writes to its output for ever": "import os\nos.fork()\nwhile True: os.write(1, b'x' * 65536)\n",
}


@pytest.mark.deep
@pytest.mark.parametrize("place", ["reply", "file"])
@pytest.mark.parametrize("what", LINGERS)
async def test_what_a_program_leaves_behind_holds_up_no_verdict(bench: Bench, what: str, place: str) -> None:
    options: dict[str, Any] = {"case_seconds": 1.5, "total_seconds": 20, **TEXTS}
    await bench.sandbox.write("solution.py", LINGERS[what].encode())
    async with asyncio.timeout(15):
        if place == "file":
            graded = await bench.grade(spec(file="solution.py", **options))
        else:
            graded = await bench.grade(spec(**options), fenced(LINGERS[what]))
    assert graded.reward == 0.0
    assert graded.reason


async def test_a_program_of_several_files(bench: Bench) -> None:
    """One file has the name of a module that the evaluator's program in the sandbox imports."""
    await bench.sandbox.write("queue.py", b"raise SystemExit(5)\n")
    await bench.sandbox.write("src/solution.py", b"import helper\nadd = helper.add\n")
    await bench.sandbox.write("src/helper.py", b"def add(a, b):\n    return a + b\n")
    for form in ("calls", "check"):
        graded = await bench.grade(spec(file="src/solution.py", **FORMS[form]))
        assert graded.reward == 1.0, graded.reason


@pytest.mark.parametrize("form", FORMS)
async def test_what_an_agent_left_in_the_sandbox_earns_nothing(bench: Bench, form: str) -> None:
    """The agent has left another python3, a sitecustomize.py, a json.py, a library in /etc/ld.so.preload, and a process
    that overwrites the files in /tmp and /work again and again with a program that would pass."""
    await bench.sandbox.exec(
        """
        printf '%s\\n' '#!/bin/sh' 'case "$*" in *ready*) printf ready; exit;; esac' \\
            'read a b; echo $((a + b)); echo PASSED' > /tmp/python3
        chmod +x /tmp/python3; cp /tmp/python3 /usr/local/bin/python3 || cp /tmp/python3 /usr/bin/python3
        echo 'import os; os._exit(0)' > sitecustomize.py; cp sitecustomize.py json.py
        echo /tmp/evil.so > /etc/ld.so.preload
        printf '%s\n' 'add = lambda a, b: a + b' 'try: print(add(*map(int, input().split())))' \
            'except EOFError: pass' > /passes
        (while :; do for f in /tmp/outrider-* /work/*; do cat /passes > "$f"; done; done) > /dev/null 2>&1 &
        """,
        seconds=20,
    )
    graded = await bench.grade(spec(**FORMS[form] | {"case_seconds": 2}), fenced("print(0)\n"))
    assert graded.reward == 0.0


async def test_a_check_that_swallows_errors_passes_no_program_that_ends_itself(bench: Bench) -> None:
    test = "def check(candidate):\n    try: candidate(1, 2)\n    except BaseException: pass\n"
    options = CHECK | {"test": test}
    assert (await bench.grade(spec(**options), fenced("import os\ndef add(a, b): os._exit(0)\n"))).reward == 0.0
    assert (await bench.grade(spec(**options), fenced(ADD))).reward == 1.0


@pytest.mark.deep
@pytest.mark.parametrize("name", ["StopIteration", "StopAsyncIteration"])
async def test_a_program_ends_no_loop_of_its_check(bench: Bench, name: str) -> None:
    test = (
        "def check(candidate):\n    pairs = map(candidate, [1, 2], [3, 4])\n    assert all(sum >= 4 for sum in pairs)\n"
    )
    graded = await bench.grade(spec(**CHECK | {"test": test}), fenced(f"def add(a, b): raise {name}\n"))
    assert graded.reward == 0.0
    assert "RuntimeError" in str(graded.reason)
    assert (await bench.grade(spec(**CHECK | {"test": test}), fenced(ADD))).reward == 1.0


@pytest.mark.deep
async def test_values_cross_as_they_are(bench: Bench) -> None:
    test = """
def check(candidate):
    for value in (None, True, 1, 1.5, 2**80, float("inf"), "a\\ud800", b"b", (1, [2]), {1, 2}, {1: (2,)}, 1j):
        back = candidate(value)
        assert back == value and type(back) is type(value), value
    try: candidate({}["x"] if False else "raise")
    except KeyError as error: assert error.args == ("'raise'",)
    else: assert False
"""
    program = "def same(x):\n    if x == 'raise': raise KeyError(x)\n    return x\n"
    graded = await bench.grade(spec(prompt="", entry_point="same", test=test), fenced(program))
    assert (graded.reward, graded.reason) == (1.0, None)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("def check(candidate): pass", "passed without a call"),
        ("def other(): pass", "KeyError: 'check'"),
        ("def check(", "SyntaxError"),
        ("def check(candidate): candidate(print)", "cannot be passed on"),
        ("def check(candidate): 1 / 0", "ZeroDivisionError"),
        ("def check(candidate):\n    while True: pass", "did not call the candidate in time"),
    ],
)
async def test_a_check_that_does_not_work_is_an_error(bench: Bench, test: str, message: str) -> None:
    with pytest.raises(EvaluatorError, match=message):
        await bench.grade(spec(**CHECK | {"test": test, "total_seconds": 4}), fenced(ADD))


@pytest.mark.deep
async def test_a_check_that_a_value_holds_up_is_the_candidates_doing(bench: Bench) -> None:
    test = "def check(candidate):\n    for _ in range(candidate(1, 2)): pass\n"
    options = CHECK | {"test": test, "total_seconds": 4}
    graded = await bench.grade(spec(**options), fenced("def add(a, b): return 10**18\n"))
    assert (graded.reward, graded.reason) == (0.0, "the check did not end in time with this candidate")


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
async def test_without_python_in_the_sandbox_it_is_an_error(bench: Bench, form: str) -> None:
    with pytest.raises(EvaluatorError, match="does not run in the sandbox") as caught:
        await bench.grade(spec(python="python3-nowhere", **FORMS[form]), fenced(GOLD[form]))
    assert "python3" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, ""),
        ({"inputs": ["1"], "outputs": []}, ""),
        ({"inputs": ["1"], "outputs": ["1"], "test": "x", "entry_point": "f"}, ""),
        ({"test": "x"}, ""),
        ({"inputs": ["1", "2"], "outputs": ["\n", ""]}, ".outputs"),
        ({"inputs": [1], "outputs": ["1"]}, ".inputs.0"),
        ({"inputs": ["{"], "outputs": ["1"], "fn_name": "f"}, ".inputs.0"),
        ({"inputs": [5], "outputs": ["1"], "fn_name": "f"}, ".inputs.0"),
        ({"inputs": [f"[{'[],' * (1 << 20)}1]"], "outputs": ["1"], "fn_name": "f"}, ".inputs"),
        ({"inputs": [f"[{'1,' * (1 << 22)}1,1]"], "outputs": ["1"], "fn_name": "f"}, ".inputs"),
        ({**TEXTS, "case_second": 1}, ".case_second"),
        ({**TEXTS, "case_seconds": 0}, ".case_seconds"),
        ({**TEXTS, "total_seconds": 60}, ".total_seconds"),
        ({**TEXTS, "total_seconds": 0.1}, ".inputs"),
        ({"inputs": ["1", "2"], "outputs": ["1", "\n"], "reward": "share"}, ".outputs.1"),
    ],
)
def test_what_is_wrong_is_named_at_submission(options: Any, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        make_evaluator(EvaluatorSpec(kind="code", options=options, seconds=60))
    assert caught.value.field == f"task.evaluator.options{field}"
