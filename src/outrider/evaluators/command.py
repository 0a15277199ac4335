"""The command evaluator: runs a shell command in the sandbox. The command may write a verdict to a file. If it does
not, its exit code is the grade.

Invariant: only the exit codes 0 and 1 are grades. If the command crashes, is killed, writes an invalid verdict or fails
to write one, that is an error, never a reward. To detect a failed write, the file is first filled with blanks: opening
it for writing empties it, so blanks that remain mean that no program tried to write.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from outrider.errors import EvaluatorError, InvalidField, RuntimeFailure
from outrider.evaluators.base import Outcome
from outrider.evaluators.verdict import parse_verdict
from outrider.messages import with_images
from outrider.sandbox.runtimes.base import ExecResult, Runtime
from outrider.spec import EvaluatorSpec
from outrider.trajectory import Verdict

MAX_VERDICT = 1 << 20
"""Maximum bytes of a verdict's file."""
FULL = "the sandbox's disk may be full: see disk_mb of task.runtime.resources"
HINT = "exit 0 or 1, or write a number or a JSON object with 'reward' to $OUTRIDER_VERDICT"
OTHER_CODE = "if this code means no, as that of grep for a missing file, end the command with `|| exit 1`"
NOT_STARTED = 126
"""The smallest exit code with which bash reports that a program could not be started or was killed."""
CLEANUP_SECONDS = 30.0
VERDICT_VARIABLE, TURNS_VARIABLE = "OUTRIDER_VERDICT", "OUTRIDER_TURNS"
UNWRITTEN = b" " * 31 + b"\n"
"""Initial content of the verdict's file. JSON ignores blanks, so a command may also append its verdict to them."""


class CommandEvaluator:
    """Runs the spec's `run` with `bash -c` in the working directory.

    The variable OUTRIDER_VERDICT names a new file outside this directory. The command may write a number to it, or a
    JSON object with the fields of a Verdict. If the command mentions OUTRIDER_TURNS, this variable names a file that
    has one line per model call: a JSON object with the fields of a GradedTurn."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        if spec.path is not None or spec.options:
            field = "path" if spec.path is not None else "options"
            raise InvalidField("evaluator kind 'command' does not take it", field=f"task.evaluator.{field}")
        if "\0" in (spec.run or ""):
            raise InvalidField("must not contain NUL", field="task.evaluator.run")
        self._run = spec.run or ""
        self._seconds = spec.seconds

    async def evaluate(self, outcome: Outcome) -> Verdict:
        runtime = outcome.runtime
        path = f"{runtime.scratch}/outrider-verdict-{secrets.token_hex(16)}"
        files = {path: UNWRITTEN}
        variables = {VERDICT_VARIABLE: path}
        if TURNS_VARIABLE in self._run:
            variables[TURNS_VARIABLE] = f"{path}-turns"
            lines = []
            for call in outcome.calls:  # the bytes of images are left out: messages refer to images by digest
                bare = (with_images(message, lambda image: replace(image, data=b"")) for message in call.messages)
                lines.append(msgspec.json.encode(replace(call, messages=tuple(bare))) + b"\n")
            files[variables[TURNS_VARIABLE]] = b"".join(lines)
        try:
            try:
                for name, content in files.items():
                    await runtime.write(name, content)
            except RuntimeFailure as error:
                await runtime.exec(["true"], seconds=CLEANUP_SECONDS)  # raises if the whole sandbox is broken
                message = f"the file for the verdict cannot be created: {error}"
                raise EvaluatorError(message, hint=FULL, inside=error.inside) from error
            result = await runtime.exec(self._run, env=variables, seconds=self._seconds)
            outcome.log(result.stdout)
            outcome.log(result.stderr)
            return await self._verdict(runtime, path, result)
        finally:
            # A broken sandbox does not matter: its files are gone anyway, and the verdict is still valid.
            with suppress(RuntimeFailure):
                await runtime.exec(["rm", "-f", *files], seconds=CLEANUP_SECONDS)

    async def _verdict(self, runtime: Runtime, path: str, result: ExecResult) -> Verdict:
        """Return the verdict that the command wrote, or else the verdict of its exit code. Raises EvaluatorError if
        there is no valid verdict."""
        try:
            written = await runtime.read(path, limit=MAX_VERDICT)
        except FileNotFoundError as error:
            raise _failure("the evaluator removed the file for the verdict", result) from error
        except (IsADirectoryError, RuntimeFailure) as error:
            await runtime.exec(["true"], seconds=CLEANUP_SECONDS)  # raises if the whole sandbox is broken
            raise _failure(f"the verdict cannot be read: {error}", result) from error
        if result.exit_code is None:
            raise _failure(f"the evaluator did not end within {self._seconds:g} s", result, inside=False)
        if result.exit_code not in (0, 1):
            raise _failure(
                f"the evaluator exited with code {result.exit_code}",
                result,
                hint=f"{HINT}; {OTHER_CODE}" if result.exit_code < NOT_STARTED else HINT,
            )
        if written == UNWRITTEN:
            return Verdict(reward=1.0 if result.exit_code == 0 else 0.0)
        try:
            return parse_verdict(written)
        except ValueError as error:
            raise _failure(f"the evaluator wrote no verdict: {error}", result) from error


def _failure(message: str, result: ExecResult, *, hint: str = HINT, inside: bool = True) -> EvaluatorError:
    """Return the error for a failed command. Callers pass `inside=False` if the command exceeded its time limit,
    because a slow host may be the cause."""
    return EvaluatorError(
        message,
        hint=hint,
        log_tail=result.log_tail(),
        inside=inside,
    )
