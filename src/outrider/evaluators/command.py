"""The command evaluator: a shell command in the sandbox grades the outcome by what it writes, or by how it exits.

It knows nothing of models. Invariant: only exit codes 0 and 1 grade; a grader that crashes, is killed, or writes
something that is no verdict is an error, never a reward. So is one that began to write and could not: opening a file
to write to it empties it, so that one which is as it was made is one that nobody tried to write to.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from outrider.errors import EvaluatorError, InvalidField, RuntimeFailure
from outrider.evaluators.base import Outcome
from outrider.evaluators.verdict import parse_verdict
from outrider.runtimes.base import ExecResult, Runtime
from outrider.spec import EvaluatorSpec
from outrider.trajectory import Verdict

MAX_VERDICT = 1 << 20
FULL = "the sandbox's disk may be full: see disk_mb of task.runtime.resources"
CLEANUP_SECONDS = 30.0
VERDICT_VARIABLE = "OUTRIDER_VERDICT"
UNWRITTEN = b" " * 31 + b"\n"
"""What is in the file for the verdict at first. Blanks: around what is appended, or written over them, they say
nothing."""


class CommandEvaluator:
    """Runs `run` by `bash -c` in the working directory. $OUTRIDER_VERDICT names a new file outside of it, which has
    nothing but blanks: a number, or a JSON object with reward, metrics and reason, may be written there."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        if spec.path is not None or spec.options:
            field = "path" if spec.path is not None else "options"
            raise InvalidField("evaluator kind 'command' does not take it", field=f"task.evaluator.{field}")
        if "\0" in (spec.run or ""):
            raise InvalidField("must not contain NUL", field="task.evaluator.run")
        self._run = spec.run or ""
        self._seconds = spec.seconds

    async def evaluate(self, outcome: Outcome) -> Verdict:
        path = f"{outcome.runtime.scratch}/outrider-verdict-{secrets.token_hex(16)}"
        try:
            await _make(outcome.runtime, path)
            result = await outcome.runtime.exec(self._run, env={VERDICT_VARIABLE: path}, seconds=self._seconds)
            return self._verdict(result, await _written(outcome.runtime, path, result))
        finally:
            with suppress(RuntimeFailure):  # a sandbox that breaks now takes the file with it, and no verdict back
                await outcome.runtime.exec(["rm", "-f", path], seconds=CLEANUP_SECONDS)

    def _verdict(self, result: ExecResult, written: bytes | None) -> Verdict:
        if result.exit_code is None:
            raise _failure(f"the evaluator did not end within {self._seconds:g} s", result, inside=False)
        if result.exit_code not in (0, 1):
            raise _failure(f"the evaluator exited with code {result.exit_code}", result)
        if written is None:
            return Verdict(reward=1.0 if result.exit_code == 0 else 0.0)
        try:
            return parse_verdict(written)
        except ValueError as error:
            raise _failure(f"the evaluator wrote no verdict: {error}", result) from error


async def _make(runtime: Runtime, path: str) -> None:
    """The file for the verdict. Raises EvaluatorError, or RuntimeFailure where the sandbox is broken."""
    try:
        await runtime.write(path, UNWRITTEN)
    except RuntimeFailure as error:
        await runtime.exec(["true"], seconds=CLEANUP_SECONDS)  # fails where more is broken than this
        raise EvaluatorError(f"there is no file for the verdict: {error}", hint=FULL, inside=error.inside) from error


async def _written(runtime: Runtime, path: str, result: ExecResult) -> bytes | None:
    """The verdict, None when none was written. Raises EvaluatorError for one that is too large, or no file (any
    more)."""
    try:
        written = await runtime.read(path, limit=MAX_VERDICT)
        return None if written == UNWRITTEN else written
    except FileNotFoundError as error:
        raise _failure("the evaluator took away the file for the verdict", result) from error
    except (IsADirectoryError, RuntimeFailure) as error:
        raise _failure(f"the verdict cannot be read: {error}", result) from error


def _failure(message: str, result: ExecResult, *, inside: bool = True) -> EvaluatorError:
    """Of the command; not `inside` where it had no time, which may have been the host's."""
    return EvaluatorError(
        message,
        hint="exit 0 or 1, or write a number or a JSON object with 'reward' to $OUTRIDER_VERDICT",
        log_tail=result.log_tail(),
        inside=inside,
    )
