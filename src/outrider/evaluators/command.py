"""The command evaluator: a shell command in the sandbox grades the outcome by what it writes, or by how it exits.

It knows nothing of models. Invariant: only exit codes 0 and 1 grade; a grader that crashes, is killed, or writes
something that is no verdict is an error, never a reward.
"""

from __future__ import annotations

import secrets

import msgspec

from outrider.errors import EvaluatorError, InvalidField
from outrider.evaluators.base import Outcome
from outrider.evaluators.verdict import parse_verdict
from outrider.runtimes.base import ExecResult
from outrider.spec import EvaluatorSpec
from outrider.trajectory import Verdict

MAX_VERDICT = 1 << 20

# One call into the sandbox: the verdict comes back behind a mark at the end of stdout. `$1` is the command, `$2`
# the folder and `$3` the mark; a verdict that was not written leaves no mark.
_SCRIPT = f"""
mkdir -m 700 "$2" || exit 125
export OUTRIDER_VERDICT="$2/verdict"
bash -c "$1" </dev/null
code=$?
if [ -e "$OUTRIDER_VERDICT" ]; then printf %s "$3"; head -c {MAX_VERDICT + 1} "$OUTRIDER_VERDICT"; fi
rm -rf "$2"
exit $code
"""
CLEANUP_SECONDS = 30.0


class CommandEvaluator:
    """Runs `run` by `bash -c` in the working directory. $OUTRIDER_VERDICT names a file that does not exist yet,
    outside of it: a number, or a JSON object with reward, metrics and reason, may be written there."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        if spec.path is not None or spec.options:
            field = "path" if spec.path is not None else "options"
            raise InvalidField("evaluator kind 'command' does not take it", field=f"task.evaluator.{field}")
        if "\0" in (spec.run or ""):
            raise InvalidField("must not contain NUL", field="task.evaluator.run")
        self._run = spec.run or ""
        self._seconds = spec.seconds

    async def evaluate(self, outcome: Outcome) -> Verdict:
        runtime, mark = outcome.runtime, secrets.token_hex(16)
        folder = f"/tmp/outrider-verdict-{secrets.token_hex(16)}"
        result = await runtime.exec(
            ["bash", "-c", _SCRIPT, "outrider-evaluator", self._run, folder, mark], seconds=self._seconds
        )
        if result.exit_code is None:
            await runtime.exec(["rm", "-rf", folder], seconds=CLEANUP_SECONDS)
        log, found, written = result.stdout.rpartition(mark.encode())
        if not found:
            log, written = result.stdout, b""
        return self._verdict(msgspec.structs.replace(result, stdout=log), written if found else None)

    def _verdict(self, result: ExecResult, written: bytes | None) -> Verdict:
        if result.exit_code is None:
            raise _failure(f"the evaluator did not end within {self._seconds:g} s", result)
        if result.exit_code not in (0, 1):
            raise _failure(f"the evaluator exited with code {result.exit_code}", result)
        if written is None:
            return Verdict(reward=1.0 if result.exit_code == 0 else 0.0)
        if len(written) > MAX_VERDICT:
            raise _failure(f"the verdict is larger than {MAX_VERDICT} bytes", result)
        try:
            return parse_verdict(written)
        except ValueError as error:
            raise _failure(f"the evaluator wrote no verdict: {error}", result) from error


def _failure(message: str, result: ExecResult) -> EvaluatorError:
    return EvaluatorError(
        message,
        hint="exit 0 or 1, or write a number or a JSON object with 'reward' to $OUTRIDER_VERDICT",
        log_tail=result.log_tail(),
    )
