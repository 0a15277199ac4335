"""The evaluator `swebench`: runs a repository's tests on the agent's changes and judges the results with swebench's
grading.

The tests run in a new sandbox that gets only the carried paths from the agent's sandbox, so the tests do not use
programs that the agent has installed. Before the run, the files that influence tests (those of the test patch, the
configuration of pytest) are restored from an untouched sandbox. swebench's own parsers judge the log in a confined
process (see `checks/pool.py`). Invariants: if the code under test disturbs the run, the reward is 0; if the machine or
the task cannot run the tests, that is an error.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import secrets
import shlex
from collections.abc import Collection
from functools import cache, partial
from pathlib import Path

from outrider.errors import EvaluatorError, InvalidField, RuntimeFailure
from outrider.evaluators.base import Outcome
from outrider.evaluators.checks.pool import Checks, Library, checks_of
from outrider.evaluators.options import read_options
from outrider.evaluators.swebench.options import CONFIGURATION, SwebenchOptions, restored_paths
from outrider.sandbox.runtimes.base import MAX_OUTPUT, MAX_PATHS, PatchConflict, Runtime
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import DiffSpec, EvaluatorSpec
from outrider.trajectory import Verdict

LIBRARY = Library(
    distribution="swebench",
    packages=("swebench", "unidiff"),
    # --no-deps leaves out the dependencies: they need 362 MB, and grading does not use them.
    install="--no-deps 'swebench>=5.0.2,<6' unidiff",
    checks="outrider.evaluators.checks.swebench_check",
)
CHECKS = partial(Checks, library=LIBRARY)
END_MARK, EXIT_CODE = ">>>>> End Test Output", ">>>>> Test Exit Code"
FILE_SECONDS = 60.0
"""Time limit in seconds of a command that only finds, removes or checks files."""
LIST_MOUNTS = r"""printf '%s\0' "$(pwd -P)" && cat /proc/self/mounts"""
"""A shell command that prints the path of the current folder, NUL, and the mounts. A newline could not mark the end of
the path: an agent may have replaced the repository with a symbolic link to a folder with a newline in its name."""
MODULE_SUFFIXES = (".py", ".pyc", ".so")
SHARE_OF_TIME = 0.75
"""Default time limit of the tests, as a fraction of the evaluation's time limit."""


class SwebenchEvaluator:
    """Gives reward 1 if swebench's report and pytest's own reports both show that the required tests pass, else 0."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._options = options = read_options(SwebenchOptions, spec)
        if not isinstance(spec.carry, list | DiffSpec):
            raise InvalidField(
                "must list what is tested: with anything else of the agent's, its own programs would run the tests",
                field="task.evaluator.carry",
                hint='such as carry = ["src"], or carry = { diff = "." }; never a folder of programs',
            )
        self._seconds = options.test_seconds or spec.seconds * SHARE_OF_TIME
        if self._seconds >= spec.seconds:  # slow tests must get reward 0, not an error
            raise InvalidField(
                f"must be below task.evaluator.seconds, which is {spec.seconds:g}",
                field="task.evaluator.options.test_seconds",
            )
        LIBRARY.require()

    async def check_spec(self, host: Host) -> None:
        """Raise InvalidField if swebench has no parser for the task's row, or if the parser refuses it."""
        request = self._options.model_dump(include=ROW)
        checks = await checks_of(host, CHECKS)
        checked = await checks.check(request, seconds=self._options.check_seconds, submitted=True)
        answer = checked.answer or {"unusable": checked.fault, "field": "log_parser"}
        if answer["unusable"] is not None:
            raise InvalidField(f"{answer['unusable']} ({LIBRARY})", field=f"task.evaluator.options.{answer['field']}")

    def decide(self, outcome: Outcome) -> Verdict | None:
        """Return reward 0 if the agent's patch is empty, as swebench's own harness does: without a change, the tests in
        `fail_to_pass` fail. The verdict lacks the metric `pass_to_pass`, because no test runs."""
        if outcome.patch != b"" or self._options.test_empty_patch or self._options.expected is not None:
            return None
        metrics = {
            "fail_to_pass": 0.0,
            "fail_to_pass_total": float(len(self._options.fail_to_pass)),
            "pass_to_pass_total": float(len(self._options.pass_to_pass)),
        }
        return Verdict(reward=0.0, metrics=metrics, reason="the patch is empty, so no test was run")

    async def evaluate(self, outcome: Outcome) -> Verdict:
        options, runtime = self._options, outcome.runtime
        checks = await checks_of(outcome.host, CHECKS)
        assert outcome.host is not None
        async with outcome.beside() as untouched:
            await self._restore(untouched, runtime, outcome.host.folder)
            new = await modules_at(runtime, options.folder) - await modules_at(untouched, options.folder)
        if options.test_command is not None and options.test_patch is not None and options.test_patch.strip():
            try:
                await runtime.patch(options.test_patch, cwd=options.folder)
            except PatchConflict as error:
                raise EvaluatorError(f"the test patch does not apply: {error}", inside=True) from error
        key, name = secrets.token_hex(16), secrets.token_hex(8)
        place, planted = f"{runtime.scratch}/outrider-{name}", planted_name()
        await runtime.write(f"{place}/outrider_{name}.py", plugin(f"{place}/report", key, planted, name).encode())
        await runtime.write(f"{place}/sitecustomize.py", finder(new, f"{place}/report", key, name).encode())
        await runtime.write(f"{place}/run.sh", script(options, place, name).encode())
        done = await runtime.exec(
            f". {shlex.quote(place)}/run.sh", cwd=options.folder, merged=True, seconds=self._seconds
        )
        outcome.log(done.stdout)
        alive = await runtime.exec(["true"], seconds=FILE_SECONDS)  # raises if the whole sandbox is broken
        if alive.exit_code != 0:
            raise EvaluatorError("the sandbox runs no program after the tests", log_tail=alive.log_tail(), inside=True)
        metrics = {
            "fail_to_pass": 0.0,
            "fail_to_pass_total": float(len(options.fail_to_pass)),
            "pass_to_pass": 0.0,
            "pass_to_pass_total": float(len(options.pass_to_pass)),
            "test_seconds": done.seconds,
        }
        if done.timed_out:
            reason = f"the tests did not end within {self._seconds:g} s ({LIBRARY})"
            return Verdict(reward=0.0, metrics=metrics, reason=reason)
        request = {
            **options.model_dump(include=ROW),
            "log": await asyncio.to_thread(done.stdout.decode, "utf-8", "replace"),
            "exit_code": done.exit_code if options.test_command is not None else None,
            "records": await records_at(runtime, f"{place}/report"),
            "key": key,
            "planted": planted,
        }
        checked = await checks.check(
            request, seconds=options.check_seconds, bucket=outcome.bucket, off_the_clock=outcome.off_the_clock
        )
        metrics["check_seconds"] = checked.seconds
        if checked.answer is None:
            return Verdict(reward=0.0, metrics=metrics, reason=f"{checked.fault} ({LIBRARY})")
        for count in ("fail_to_pass", "pass_to_pass"):
            metrics[count] = float(checked.answer[count])
        why = checked.answer["why"]
        return Verdict(
            reward=float(checked.answer["resolved"]), metrics=metrics, reason=f"{why or 'resolved'} ({LIBRARY})"
        )

    async def _restore(self, untouched: Runtime, runtime: Runtime, folder: Path) -> None:
        """In the sandbox `runtime`, replace the files that influence tests with those of the sandbox `untouched`."""
        options, found = self._options, set[str]()
        # Remove the folders of compiled files. pytest loads a compiled file if the time and the size that it records
        # are those of its source. So an agent could leave compiled code that runs in place of the restored conftest.py.
        words = ("-name", "__pycache__", "-prune", "-exec", "rm", "-rf", "--", "{}", "+")
        await find(runtime, options.folder, *words)
        if options.restored is None:
            names = [word for name in CONFIGURATION for word in ("-o", "-name", name)][1:]
            for sandbox in (untouched, runtime):
                printed = await find(sandbox, options.folder, "(", *names, ")", "-print0")
                found |= {posixpath.normpath(path) for path in printed.split("\0")}
        # This runs in a thread, because parsing a patch may take long.
        restored = await asyncio.to_thread(restored_paths, options, found - {"."})
        paths = [posixpath.join(options.folder, path) for path in restored]
        if len(paths) > MAX_PATHS:
            raise EvaluatorError(f"the repository configures its tests in more than {MAX_PATHS} files", inside=True)
        archive = folder / f"restored-{secrets.token_hex(8)}"
        try:
            await untouched.snapshot(paths, archive)
            # The paths are removed first, because an agent may have put symbolic links there.
            await runtime.exec(["rm", "-rf", "--", *paths], seconds=FILE_SECONDS)
            await runtime.restore(archive, paths)
        finally:
            await asyncio.to_thread(archive.unlink, missing_ok=True)


async def find(runtime: Runtime, folder: str, *words: str) -> str:
    """Run `find` with the arguments `words` in a folder, and return its output. The search skips read-only mounts, such
    as the mount of the agent's program. Read-only mounts belong to the task, and no agent can change them. Raises
    EvaluatorError if a command fails or prints too much."""
    mounts = await runtime.exec(LIST_MOUNTS, cwd=folder, seconds=FILE_SECONDS)
    pruned = [word for path in read_only_mounts(mounts.stdout) for word in ("-path", path, "-prune", "-o")]
    done = await runtime.exec(["find", ".", *pruned, *words], cwd=folder, seconds=FILE_SECONDS)
    if mounts.exit_code != 0 or done.exit_code != 0 or len(done.stdout) >= MAX_OUTPUT:
        log_tail = mounts.log_tail() + done.log_tail()
        raise EvaluatorError(
            "the repository cannot be searched for what decides about tests", log_tail=log_tail, inside=True
        )
    return done.stdout.decode("utf-8", "surrogateescape")


async def modules_at(runtime: Runtime, folder: str) -> set[str]:
    """Return the absolute paths of the files in a folder that Python could import. Raises EvaluatorError (see
    `find`)."""
    above = await runtime.exec(["pwd", "-P"], cwd=folder, seconds=FILE_SECONDS)
    words = [word for suffix in MODULE_SUFFIXES for word in ("-o", "-name", f"*{suffix}")][1:]
    printed = await find(runtime, folder, "(", *words, ")", "-print0")
    start = above.stdout.decode("utf-8", "surrogateescape")[:-1]
    return {posixpath.join(start, posixpath.normpath(path)) for path in printed.split("\0") if path}


def read_only_mounts(printed: bytes) -> list[str]:
    """Return the read-only mounts below a folder, as patterns for `find` in this folder. `printed` is the output of
    LIST_MOUNTS. In paths, the kernel escapes only spaces, tabs, newlines and backslashes (fstab(5))."""
    folder, _, mounts = printed.decode("utf-8", "surrogateescape").partition("\0")
    found = []
    for line in filter(None, mounts.split("\n")):
        _, place, _, flags, *_ = line.split(" ")
        place = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), place)
        if "ro" in flags.split(",") and place.startswith(f"{folder.rstrip('/')}/"):
            found.append(re.sub(r"([][*?\\])", r"\\\1", f"./{posixpath.relpath(place, folder)}"))
    return found


ROW = {
    *("instance_id", "fail_to_pass", "pass_to_pass", "log_parser", "repo", "version", "eval_type", "pytest"),
    "expected",
}
"""The options that swebench's parsers and grading need."""
WORDS = (
    (
        "add",
        "build",
        "clear",
        "copy",
        "find",
        "join",
        "load",
        "merge",
        "move",
        "parse",
        "read",
        "save",
        "sort",
        "split",
    ),
    (
        "a_long",
        "a_new",
        "a_nested",
        "a_short",
        "all",
        "an_empty",
        "an_old",
        "another",
        "each",
        "many",
        "no",
        "the_last",
    ),
    (
        "entry",
        "field",
        "file",
        "group",
        "item",
        "key",
        "line",
        "list",
        "name",
        "option",
        "path",
        "row",
        "text",
        "value",
    ),
    ("again", "at_once", "by_default", "by_name", "first", "from_text", "in_order", "in_place", "later", "with_blanks"),
)
"""Words for `planted_name`. A name has one word of each tuple, in this order."""


@cache
def source_text(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def planted_name() -> str:
    """Return a random name for the test that the plugin adds to each test module. The name looks like the names of
    other tests."""
    return "_".join(("test", *map(secrets.choice, WORDS)))


def plugin(path: str, key: str, planted: str, name: str) -> str:
    """Return the plugin's source text for one evaluation. The plugin reports to the file `path`, and adds a test named
    `planted` to each test module."""
    words = ", ".join(map(repr, (path, key, planted, f"-p outrider_{name} ")))
    return (
        f"{source_text('pytest_plugin.py')}\n\nglobals().update(canaries({key!r}))\n"
        f"\n\ndef pytest_configure(config):\n    plant(config, {words})\n"
    )


def finder(new: Collection[str], path: str, key: str, name: str) -> str:
    """Return the text of `sitecustomize.py` for one evaluation. `new` are the paths of modules that the agent has
    added."""
    words = ", ".join(map(repr, (sorted(new), path, key, f"-p outrider_{name} ")))
    return f"{source_text('shadow_finder.py')}\n\nstart({words})\n"


def script(options: SwebenchOptions, place: str, name: str) -> str:
    """Return the script that runs the tests: the task's own commands, after variables that make pytest load the
    plugin."""
    lines = []
    if options.pytest is not False:
        lines += [
            f"export PYTHONPATH={shlex.quote(place)}${{PYTHONPATH:+:$PYTHONPATH}}",
            f'export PYTEST_ADDOPTS="-p outrider_{name} ${{PYTEST_ADDOPTS-}}"',
        ]
    for line in (options.eval_script or options.test_command or "").split("\n"):
        # swebench's own harness adds the same lines.
        marked = options.eval_script is not None and END_MARK in line
        lines += ["SWEBENCH_TEST_EXIT_CODE=$?"] if marked else []
        lines.append(line)
        lines += [f'echo "{EXIT_CODE}: $SWEBENCH_TEST_EXIT_CODE"'] if marked else []
    return "\n".join(lines) + "\n"


async def records_at(runtime: Runtime, path: str) -> str:
    """Return the text of the plugin's report. If the report cannot be read, return "" or an error message: neither
    passes as a report. Raises RuntimeFailure if the whole sandbox is broken."""
    try:
        return (await runtime.read(path, follow=False)).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except (IsADirectoryError, RuntimeFailure) as error:
        await runtime.exec(["true"], seconds=FILE_SECONDS)  # raises if the whole sandbox is broken
        return str(error)
