"""For kind `swebench`: a repository with a fault, its hidden tests, and sandboxes with the changes of candidates."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from outrider.evaluators.base import Outcome
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.base import HarnessOutcome
from outrider.lifecycle import StopReason
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import EvaluatorSpec, HarnessSpec, Resources, TaskSpec
from outrider.trajectory import Verdict
from runtimes.world import World

TEST = "tests/test_prices.py"
FAULT = "def total(prices):\n    return sum(prices[1:])\n"
FIX = "def total(prices):\n    return sum(prices)\n"
BASE = {
    "pyproject.toml": "[tool.pytest.ini_options]\n",
    "conftest.py": "import sys\n",
    "src/shop/__init__.py": "from shop.prices import total\n",
    "src/shop/prices.py": FAULT,
    "tests/helpers.py": "def check(found, wanted):\n    assert found == wanted\n",
    TEST: "from shop import total\n\ndef test_empty():\n    assert total([]) == 0\n",
}
PATCH = f"""\
diff --git a/{TEST} b/{TEST}
--- a/{TEST}
+++ b/{TEST}
@@ -1,1 +1,2 @@
+from helpers import check
 from shop import total
@@ -4,1 +5,7 @@
     assert total([]) == 0
+
+def test_all_are_counted():
+    check(total([1, 2]), 3)
+
+def test_it_is_a_number():
+    assert total([1]) != 7
"""
QUICK = "PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"
COMMAND = f"{QUICK} {sys.executable} -m pytest -rA -p no:cacheprovider {TEST}"
ROW: dict[str, Any] = {
    "instance_id": "shop__shop-1",
    "fail_to_pass": [f"{TEST}::test_all_are_counted"],
    "pass_to_pass": [f"{TEST}::test_empty", f"{TEST}::test_it_is_a_number"],
    "test_patch": PATCH,
    "test_command": COMMAND,
    "log_parser": "parse_log_pytest",
}
FIELDS: dict[str, Any] = {
    "workdir": "/repository",
    "env": {"PYTHONPATH": "src"},
    "mounts": tuple(Path(path) for path in sorted({sys.prefix, sys.base_prefix})),
    "resources": {"pids": 96, "memory_mb": 1024},
}

AS_IN_AN_IMAGE = f"touch -d 2026-01-01 {' '.join(BASE)}"
"""Sets the same modification time for the files in every sandbox."""
GIT = "git init -q . && git add -A && git -c user.name=a -c user.email=a@b.c commit -q -m base && git tag base"
SCRIPT = f"""\
#!/bin/bash
set -uxo pipefail
git status
git checkout base {TEST}
git apply -v - <<'EOF_PATCH'
{PATCH}EOF_PATCH
: '>>>>> Start Test Output'
{COMMAND}
: '>>>>> End Test Output'
git checkout base {TEST}
"""
"""The `eval_script` of a row of swebench 5.x."""


def spec_of(**options: Any) -> EvaluatorSpec:
    return EvaluatorSpec(kind="swebench", options={**ROW, **options}, carry=["src", "tests"], seconds=120)


class Repository:
    """Grades candidates. A candidate is a mapping of paths to file contents, which are written over the repository's
    files. None removes the file or folder."""

    def __init__(self, world: World, *, git: bool, mounts: Sequence[Mapping[str, str]]) -> None:
        self._world = world
        self._git = git
        self.log = bytearray()
        self._fields = {**FIELDS, "named": list(mounts)}

    @asynccontextmanager
    async def sandbox(self, resources: Resources | None = None) -> AsyncIterator[Runtime]:
        """Yield a sandbox in the state that its prepare steps leave."""
        fields = self._fields if resources is None else self._fields | {"resources": resources}
        runtime = await self._world.start("namespace", **fields)
        try:
            for path, text in BASE.items():
                await runtime.write(path, text.encode())
            done = await runtime.exec(f"{AS_IN_AN_IMAGE} && {GIT}" if self._git else AS_IN_AN_IMAGE, seconds=30)
            assert done.exit_code == 0, done.log_tail()
            yield runtime
        finally:
            await runtime.stop()

    async def grade(self, changes: Mapping[str, str | None], *commands: str, **options: Any) -> Verdict:
        spec = spec_of(**options)
        async with self.sandbox() as runtime:
            for path, text in changes.items():
                if text is None:
                    await runtime.exec(["rm", "-r", path], seconds=10)
                else:
                    await runtime.write(path, text.encode())
            for command in commands:
                assert (await runtime.exec(command, seconds=30)).exit_code == 0
            outcome = Outcome(
                task=TaskSpec(instruction="x", harness=HarnessSpec(command=["true"]), evaluator=spec),
                runtime=runtime,
                stop_reason=StopReason.COMPLETED,
                harness=HarnessOutcome(),
                transcript=(),
                turns=1,
                beside=self.sandbox,
                log=self.log.extend,
                host=self._world.host,
            )
            return await make_evaluator(spec).evaluate(outcome)


@asynccontextmanager
async def a_repository(*, git: bool = False, mounts: Sequence[Mapping[str, str]] = ()) -> AsyncIterator[Repository]:
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        async with Host(Path(name)) as host:
            world = World(host)
            try:
                yield Repository(world, git=git, mounts=mounts)
            finally:
                for runtime in world.made:
                    await runtime.stop()
