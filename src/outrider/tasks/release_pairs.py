"""Makes three tasks of real software from pairs of releases on PyPI. The agent must apply a fix of the newer release to
the older release. Tests of the newer release grade the result.

The first call downloads the source distributions of both releases, makes the tasks and caches them. The older release
is the repository. The test patch is the difference between the releases' tests, and the known solution is the
difference between their sources. The tests are run in sandboxes, to find out which of them fail without the solution
and pass with it. Invariant: Outrider contains no code of these packages.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from outrider.concurrency.build_once import build_once
from outrider.environment import cache_home
from outrider.errors import InvalidField, ServiceError
from outrider.evaluators.checks.pool import checks_of
from outrider.evaluators.swebench.evaluator import CHECKS, LIBRARY
from outrider.evaluators.swebench.options import is_test
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import RuntimeSpec
from outrider.tasks.datasets import Example
from outrider.tasks.swebench import swebench_example

FORMAT = 2
"""Part of the key in the cache. Increase this number after a change to the code that makes different tasks from the
same releases."""
TOOLS = ("pytest==8.4.2", "markupsafe==3.0.3")
PARSER = "parse_log_pytest"
PASSING = frozenset(("PASSED", "XFAIL"))
"""Statuses that count as passed in swebench. XFAIL is needed because two tests of sqlparse are expected to fail."""
COMMAND = "python3 -B -m pytest -rA -p no:cacheprovider {tests}"
DOWNLOAD_SECONDS, TEST_SECONDS, CHECK_SECONDS = 600, 300.0, 20.0
PAIRS = "/pairs"
"""Where the repository and the tools are mounted, read-only, in a sandbox."""
COPY = f"cp -r {PAIRS}/base/. ."


class ReleasePair(NamedTuple):
    """Two versions of a package, `old` and `new`. `folder` has the package's code in the source distribution. `asks`
    describes the fix to the agent."""

    name: str
    old: str
    new: str
    folder: str
    asks: str


RELEASES = (
    ReleasePair(
        "tomlkit",
        "0.12.1",
        "0.12.2",
        "tomlkit",
        "True division of a TOML integer (`item / 2`) must give a TOML float item; at the moment it does not.",
    ),
    ReleasePair(
        "sqlparse",
        "0.5.0",
        "0.5.1",
        "sqlparse",
        "Stripping comments with `sqlparse.format(sql, strip_comments=True)` must leave the rest of a statement as it "
        "was: line breaks and blanks around a removed comment are lost or doubled, and optimizer hints (`/*+ ... */`) "
        "must not be removed.",
    ),
    ReleasePair(
        "jinja2",
        "3.1.2",
        "3.1.3",
        "src",
        "The filter `xmlattr` must not accept keys with spaces: a key that a user chose could add further attributes "
        "to the element. Raise ValueError for such a key.",
    ),
)


def release_pair_examples(
    *, limit: int | None = None, note: Callable[[str], object] = lambda text: None
) -> list[Example]:
    """Return the tasks, for the namespace runtime of this machine. The first call blocks for minutes, and calls `note`
    with a line of text for each task that is not in the cache. Raises InvalidField if swebench or the namespace runtime
    is missing, or if pip fails. Raises ServiceError if the tests of a pair do not run or do not show the fix."""
    LIBRARY.require()
    if not (can := NamespaceRuntime.available()).ok:
        raise InvalidField(f"release pairs need the namespace runtime: {can.detail}", field="source", hint=can.hint)
    cache = cache_home().absolute() / "release-pairs"
    tools = build_once(cache / f"tools-{FORMAT}", lambda draft: pip("install", *TOOLS, "--target", str(draft)))

    def example(pair: ReleasePair) -> Example:
        place = cache / f"{pair.name}-{pair.new}-{FORMAT}"
        if not place.exists():
            note(f"making a task of {pair.name} {pair.old} and {pair.new}")
        build_once(place, lambda draft: make(pair, draft, tools))
        row = json.loads((place / "row.json").read_text("utf-8"))
        template = {"runtime": runtime_of(pair, place, tools), "evaluator": {"carry": [pair.folder], "seconds": 600}}
        return swebench_example(row, template=template)

    # Threads make the tasks concurrently, because pip mostly waits for the package index.
    with ThreadPoolExecutor(len(RELEASES)) as threads:
        return list(threads.map(example, RELEASES[:limit]))


def make(pair: ReleasePair, draft: Path, tools: Path) -> None:
    """Write the older release to `base/` in `draft`, and the row of the task to `row.json` in `draft`."""
    with ThreadPoolExecutor(2) as threads:
        before, after = threads.map(partial(source_of, pair), (pair.old, pair.new))
    for name, data in before.items():
        (draft / "base" / name).parent.mkdir(parents=True, exist_ok=True)
        (draft / "base" / name).write_bytes(data)
    sources = difference(before, after, lambda name: name.endswith(".py") and not is_test(name))
    tests = difference(before, after, is_test)
    row: dict[str, Any] = {
        "instance_id": f"{pair.name}__{pair.name}-{pair.new}",
        "version": pair.old,
        "problem_statement": pair.asks,
        "patch": sources,
        "test_patch": tests,
        "log_parser": PARSER,
        "test_command": COMMAND,
        "FAIL_TO_PASS": ["all"],
    }
    command = swebench_example(row).task["evaluator"]["options"]["test_command"]
    found = [asyncio.run(statuses(pair, draft, tools, command, patches)) for patches in ((tests,), (tests, sources))]
    passing = [{test for test, status in one.items() if status in PASSING} for one in found]
    row["FAIL_TO_PASS"] = sorted(passing[1] - passing[0])
    row["PASS_TO_PASS"] = sorted(passing[1] & passing[0])
    if not row["FAIL_TO_PASS"]:
        raise ServiceError(f"no test of {pair.name} {pair.new} fails before its changes and passes after them")
    (draft / "row.json").write_text(json.dumps(row, indent=1), encoding="utf-8")


async def statuses(
    pair: ReleasePair, place: Path, tools: Path, command: str, patches: tuple[str, ...]
) -> dict[str, str]:
    """Apply the patches and run the tests. Returns the status of each test, which swebench reads from the log."""
    with tempfile.TemporaryDirectory(prefix="outrider-pair-") as name:
        folder = Path(name)
        (folder / "sandbox").mkdir()
        async with Host(folder) as host:
            context = SandboxContext(
                session_id="pair",
                attempt=1,
                directory=folder / "sandbox",
                host=host,
                gateway_url="http://127.0.0.1:9",
                gateway_socket=folder / "gateway.sock",
            )
            context.gateway_socket.touch()
            spec = RuntimeSpec.model_validate(runtime_of(pair, place, tools))
            runtime = NamespaceRuntime.create(spec, context)
            await runtime.start()
            try:
                await runtime.exec(COPY, seconds=TEST_SECONDS)
                for patch in patches:
                    await runtime.patch(patch)
                done = await runtime.exec(command, merged=True, seconds=TEST_SECONDS)
            finally:
                await runtime.stop()
            request = {
                "instance_id": pair.name,
                "log_parser": PARSER,
                "log": done.stdout.decode("utf-8", "replace"),
                "exit_code": done.exit_code,
                "statuses": True,
            }
            checked = await (await checks_of(host, CHECKS)).check(request, seconds=CHECK_SECONDS)
    found: dict[str, str] = (checked.answer or {}).get("statuses", {})
    if not found:
        raise ServiceError(f"the tests of {pair.name} do not run in a sandbox", log_tail=done.log_tail())
    return found


def runtime_of(pair: ReleasePair, place: Path, tools: Path) -> dict[str, Any]:
    """Return the spec of the sandbox for a pair's task. `place` is the folder that `make` has filled."""
    library = pair.folder if pair.folder == "src" else "."
    return {
        "mounts": [
            {"source": str(place / "base"), "target": f"{PAIRS}/base"},
            {"source": str(tools), "target": f"{PAIRS}/tools"},
        ],
        "env": {"PYTHONPATH": f"{library}:{PAIRS}/tools", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        "prepare": [{"run": COPY}],
    }


def source_of(pair: ReleasePair, version: str) -> dict[str, bytes]:
    """Return the files of a release's source distribution. Paths are relative to its top folder."""
    with tempfile.TemporaryDirectory(prefix="outrider-pair-") as folder:
        # This option downloads only the package itself as source. The value `:all:` would also download the package's
        # build tools as source.
        wanted = ("--no-deps", "--no-binary", pair.name, f"{pair.name}=={version}")
        pip("download", *wanted, "--dest", folder)
        [archive] = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            return {
                member.name.partition("/")[2]: found.read()
                for member in tar
                if member.isreg() and (found := tar.extractfile(member)) is not None
            }


def difference(before: Mapping[str, bytes], after: Mapping[str, bytes], wanted: Callable[[str], bool]) -> str:
    """Return a diff of the `wanted` files, in git's format. Files that are not text are left out."""
    written = []
    for name in sorted(filter(wanted, {*before, *after})):
        try:
            old, new = (side.get(name, b"").decode("utf-8") for side in (before, after))
        except UnicodeDecodeError:
            continue
        if old == new and (name in before) == (name in after):
            continue
        written.append(f"diff --git a/{name} b/{name}\n")
        if name not in before:
            written.append("new file mode 100644\n")
        if name not in after:
            written.append("deleted file mode 100644\n")
        froms, to = (f"a/{name}" if name in before else "/dev/null", f"b/{name}" if name in after else "/dev/null")
        lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), froms, to)
        for line in lines:
            written.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(written)


def pip(*words: str, seconds: float = DOWNLOAD_SECONDS) -> None:
    """Run pip. Raises InvalidField if it exceeds `seconds` or fails. If it fails, the message has the end of pip's
    error output."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        message = f"pip {words[0]} did not end within {seconds:g} s"
        raise InvalidField(message, field="source", hint="is the package index reachable?") from error
    if done.returncode != 0:
        raise InvalidField(f"pip {words[0]} failed: {done.stderr.strip()[-500:]}", field="source")
