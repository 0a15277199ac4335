"""The evaluator `code`: runs a program, the candidate, in a sandbox and compares its results on the node.

A program from the agent's last reply runs in a new sandbox with small limits. If this program may need files of the
task, it runs in the outcome's sandbox instead. A program in a file runs in the sandbox that has the file.

The candidate may have changed everything in its sandbox, including the interpreter. So the node sends only inputs to
this sandbox, never expected results. A hidden `check(candidate)` is Python code of the task's author, and runs in a
second, untouched sandbox. When the check calls the candidate, the node passes the arguments and the result between the
two sandboxes, as values of built-in types.

Invariants:

- Expected outputs and tests are never in the candidate's sandbox.
- A candidate that misbehaves, takes too long or prints too much fails its case.
- If the candidate cannot run for any other reason, that is an error, not a failed case.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from outrider.errors import EvaluatorError, InvalidField, RuntimeFailure
from outrider.evaluators.answers import last_reply
from outrider.evaluators.base import Outcome
from outrider.evaluators.code.cases import CodeOptions, cases_of, json_value, lines
from outrider.evaluators.code.guest import MARK, encode
from outrider.evaluators.options import read_options
from outrider.sandbox.runtimes.base import ExecResult, NoShell, Runtime, Shell, ShellResult, TellsCause
from outrider.spec import EvaluatorSpec, Resources
from outrider.trajectory import Verdict

FENCED = re.compile(r"^ {0,3}```[^\n`]*\n(.*?)^ {0,3}```", re.DOTALL | re.MULTILINE)
READY = "ready"
PROBE_SECONDS = 30.0
QUOTED = 200
"""Maximum characters of a wrong answer in a verdict's reason."""
RUN_SECONDS = 0.05
"""Assumed minimum duration of one run of a program, in seconds."""
LAST_LOOK_SECONDS = 0.5
"""After the limit of LATE_SECONDS, a result is still accepted for this many seconds. It may have waited in the socket
while this process stood still."""
LATE_SECONDS = 10.0
"""If a program still runs this many seconds after its time limit, it counts as impossible to stop. For example, a fork
bomb of thousands of processes leaves the sandbox's own process no processor time to kill it."""
SMALL = Resources(memory_mb=1024, disk_mb=256, pids=64)
"""Limits of a sandbox for a program from the last reply. `pids` is so low that even a fork bomb leaves the sandbox's
own process enough processor time to kill it."""
FEW_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "4")
"""Environment variables of the programs. Without these variables, numerical libraries would start one thread per
processor of the machine. Together, these threads may exceed the limit `pids` of SMALL."""


class WrongAnswer(Exception):
    """The candidate failed a case or a check. The message becomes the verdict's reason."""


class CodeEvaluator:
    """Grades a program (see `CodeOptions`). The verdict's metrics are `passed` and `cases`, the numbers of passed and
    of all cases. A hidden check counts as one case, and adds the metric `calls`, the number of times that the check
    called the candidate."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._options = options = read_options(CodeOptions, spec)
        self._cases = 1 if options.test is not None else len(cases_of(options))
        """Number of cases. The cases themselves are built again for each evaluation, because parsed cases need ten
        times the memory of their text."""
        self._seconds = options.total_seconds or spec.seconds * 0.75
        if self._seconds >= spec.seconds:  # a slow candidate must get reward 0, not an error
            raise InvalidField(
                f"must be below task.evaluator.seconds, which is {spec.seconds:g}",
                field="task.evaluator.options.total_seconds",
            )
        if options.test is None and self._cases * RUN_SECONDS > self._seconds:
            raise InvalidField(
                f"{self._cases} cases do not run in {self._seconds:g} s",
                field="task.evaluator.options.inputs",
                hint=f"each takes {RUN_SECONDS:g} s at the least: give fewer, or more task.evaluator.seconds",
            )

    async def evaluate(self, outcome: Outcome) -> Verdict:
        if self._options.file is not None:
            return await self._graded(outcome, self._options.file)
        found: list[str] = FENCED.findall(last_reply(outcome))
        if not found or not found[-1].strip():
            return self._verdict(0, "there is no block of code in the last reply")
        async with place_of_reply(outcome) as runtime:
            program = f"{runtime.scratch}/outrider-code-{secrets.token_hex(8)}.py"
            await runtime.write(program, found[-1].encode("utf-8", "replace"))
            return await self._graded(msgspec.structs.replace(outcome, runtime=runtime), program)

    async def _graded(self, outcome: Outcome, program: str) -> Verdict:
        try:
            await probe(outcome.runtime, self._options.python)
        except EvaluatorError as error:
            if error.inside:
                raise
            async with outcome.beside() as other:  # if Python fails here, too, the agent is not the cause
                await probe(other, self._options.python)
            raise error.replace(inside=True) from error.__cause__
        if self._options.test is not None:
            return await self._checked(outcome, program)
        candidate = CandidateProgram(outcome, program, self._options, self._seconds)
        passed, reason = 0, None
        for number, case in enumerate(await asyncio.to_thread(cases_of, self._options)):
            try:
                if self._options.fn_name is None:
                    answer: Any = await candidate.printed(case.given)
                else:
                    answer = await candidate.called(self._options.fn_name, case.given)
                if not case.accepts(answer):
                    raise WrongAnswer(f"wrong answer: {answer!r:.{QUOTED}}")
            except (WrongAnswer, RecursionError) as error:
                reason = reason or f"case {number} of {self._cases}: {error}"
                if self._options.reward == "all" or candidate.broke_sandbox:
                    break
            else:
                passed += 1
        return self._verdict(passed, reason)

    async def _checked(self, outcome: Outcome, program: str) -> Verdict:
        """Run the task's hidden check in a second sandbox, and return the verdict."""
        options, calls = self._options, 0
        async with outcome.beside() as trusted:
            try:
                shell = await trusted.open_shell("python")
            except NoShell as error:
                raise EvaluatorError(f"the check cannot run: {error.message}", hint=error.hint) from error
            about = (options.prompt, options.entry_point, options.test)
            words = ", ".join(map(repr, about))
            # The time limit starts only here, because the start of the second sandbox must not count.
            candidate = CandidateProgram(outcome, program, options, self._seconds)
            try:
                event = await candidate.check_step(shell, f"{guest()}\nchecker = Checker({words})\nchecker.step()")
                while call := event.get("call"):
                    calls += 1
                    assert options.entry_point is not None
                    answer = await candidate.asked(options.entry_point, call, prompt=options.prompt)
                    event = await candidate.check_step(shell, f"checker.step({json.dumps(answer)!r})")
            except WrongAnswer as error:
                event = {"failed": f"call {calls}: {error}"}
            except TimeoutError as error:
                if not calls:
                    raise EvaluatorError("the check did not call the candidate in time") from error
                event = {"failed": "the check did not end in time with this candidate"}
        if "broken" in event or event == {"passed": 0}:
            raise EvaluatorError(
                f"the check does not work: {event.get('broken', 'it passed without a call of the candidate')}",
                hint="`test` must define check(candidate), and call the candidate",
            )
        verdict = self._verdict(int("passed" in event), event.get("failed"))
        verdict.metrics["calls"] = float(calls)
        return verdict

    def _verdict(self, passed: int, reason: str | None) -> Verdict:
        reward = passed / self._cases if self._options.reward == "share" else float(passed == self._cases)
        return Verdict(reward=reward, metrics={"passed": float(passed), "cases": float(self._cases)}, reason=reason)


class CandidateProgram:
    """Runs the candidate's program in the outcome's sandbox, each time in a new process. `seconds` is the time limit of
    all runs and of the check together. The time is measured on the node, because the candidate can slow down what a
    sandbox does not measure, such as the transfer of its output. If the node stands still while a sandbox works, this
    costs the candidate nothing.

    The methods raise WrongAnswer if the candidate is the cause of a failure, otherwise RuntimeFailure or
    EvaluatorError.
    """

    def __init__(self, outcome: Outcome, program: str, options: CodeOptions, seconds: float) -> None:
        self._outcome = outcome
        self._runtime = outcome.runtime
        self._log = outcome.log
        self._program = program
        self._options = options
        self._env = {name: few for name, few in FEW_THREADS.items() if name not in outcome.task.runtime.env}
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._deadline = self._clock() + seconds
        self._late = min(LATE_SECONDS, (outcome.task.evaluator.seconds - seconds) / 3)
        self.broke_sandbox = False

    @property
    def left(self) -> float:
        """Seconds left for all runs and the check together."""
        return self._deadline - self._clock()

    async def printed(self, text: str) -> list[str]:
        """Return the lines that the program prints for the input `text`."""
        done = await self._ran([self._options.python, "-B", self._program], text.encode("utf-8", "replace"))
        # The output is decoded in a thread. The candidate chooses the length of the output, and decoding a long output
        # would block the event loop.
        return await asyncio.to_thread(lambda: lines(done.stdout.decode("utf-8", "backslashreplace")))

    async def called(self, name: str, args: list[Any]) -> Any:
        """Return the result of the program's function `name`. Tuples become lists."""
        answer = await self.asked(name, {"args": encode(args), "kwargs": encode({})})
        if "raised" in answer:
            raise WrongAnswer(": ".join(answer["raised"])[:QUOTED])
        try:
            return await asyncio.to_thread(json_value, answer["value"])
        except (ArithmeticError, ValueError, TypeError, RecursionError) as error:
            raise WrongAnswer("the function returned no value of JSON's types") from error

    async def asked(self, name: str, call: dict[str, Any], *, prompt: str = "") -> dict[str, Any]:
        """Call the program's function `name`, and return the result in the format of `guest.run_call`: the encoded
        `value`, or `raised`."""
        request = {"file": self._program, "prompt": prompt, "name": name, **call}
        # -I keeps Python from importing a candidate's file in place of a standard module of the same name.
        command = [self._options.python, "-I", "-B", "-c", f"{guest()}\nrun_call()"]
        done = await self._ran(command, json.dumps(request).encode())
        try:
            return await asyncio.to_thread(read_result, done.stdout)
        except (ValueError, RecursionError) as error:  # the candidate has written to the same output stream
            raise WrongAnswer("the program gave no answer to the call") from error

    async def _ran(self, command: list[str], given: bytes) -> ExecResult:
        if self.left <= 0:
            raise WrongAnswer("no time is left")
        seconds = min(self._options.case_seconds, self.left)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                last_look = loop.call_later(
                    seconds + self._late, lambda: limit.reschedule(loop.time() + LAST_LOOK_SECONDS)
                )
                try:
                    with self._stalls_excused():
                        done = await self._runtime.exec(command, env=self._env, stdin=given, seconds=seconds)
                finally:
                    last_look.cancel()
        except TimeoutError as error:
            await self._confirm_broken()
            raise WrongAnswer(f"the program could not be ended after {seconds:.3g} s") from error
        except RuntimeFailure as error:
            inside = error.inside or (isinstance(self._runtime, TellsCause) and await self._runtime.broken_inside())
            if not inside:
                raise
            await self._confirm_broken()
            raise WrongAnswer(f"the program broke its sandbox: {error.message}") from error
        self._log(f"[exit code {done.exit_code} after {done.seconds:.2f} s]\n".encode())
        self._log(done.stdout)
        self._log(done.stderr)
        if done.timed_out:
            raise WrongAnswer(f"the program did not end within {seconds:.3g} s")
        if done.exit_code != 0:
            raise WrongAnswer(f"the program ended with exit code {done.exit_code}: {done.log_tail(limit=QUOTED)}")
        if len(done.stdout) > self._options.output_bytes:
            raise WrongAnswer(f"the program printed more than {self._options.output_bytes} bytes")
        return done

    async def check_step(self, shell: Shell, text: str) -> dict[str, Any]:
        """Run one step of the check. Returns and raises the same as `stepped`."""
        with self._stalls_excused():
            return await stepped(shell, text, self.left)

    @contextmanager
    def _stalls_excused(self) -> Iterator[None]:
        """Do not count the seconds in which the event loop stands still during the `with` block."""
        before = self._outcome.stalled_seconds()
        try:
            yield
        finally:
            self._deadline += self._outcome.stalled_seconds() - before

    async def _confirm_broken(self) -> None:
        """Start a new sandbox to find out whether the candidate broke its own sandbox. If Python works in the new
        sandbox, the candidate is the cause: set `broke_sandbox`. Otherwise, the failure of the new sandbox is
        raised."""
        async with self._outcome.beside(small(self._outcome.task.runtime.resources)) as other:
            await probe(other, self._options.python)
        self.broke_sandbox = True


@asynccontextmanager
async def place_of_reply(outcome: Outcome) -> AsyncIterator[Runtime]:
    """Yield the sandbox in which to run a program from the last reply: a new one with small limits. But if the task
    carries or prepares files, the program may need them, so it runs in the outcome's sandbox."""
    if outcome.task.evaluator.carry is not None or outcome.task.runtime.prepare:
        yield outcome.runtime
        return
    async with outcome.beside(small(outcome.task.runtime.resources)) as own:
        yield own


def small(resources: Resources) -> Resources:
    """Return the limits of a sandbox for one program. The sandbox has the processors of `resources` and no GPUs. For
    memory, disk and processes, the lower one of the limits in `resources` and in SMALL applies."""
    return Resources(
        cpus=resources.cpus,
        memory_mb=min(resources.most_memory_mb, SMALL.most_memory_mb),
        disk_mb=min(resources.disk_mb, SMALL.disk_mb),
        pids=min(resources.pids, SMALL.pids),
    )


def read_result(answer: bytes) -> dict[str, Any]:
    """Parse the output of `guest.run_call`. Raises ValueError or RecursionError if the output has another form.

    The value stays encoded: the candidate has made it, and decoding it could take very long.
    """
    match json.loads(answer):
        case {"value": coded, **others} if not others:
            return {"value": coded}
        case {"raised": [str(kind), str(message)], **others} if not others:
            return {"raised": [kind, message]}
    raise ValueError("neither a value nor an exception")


async def probe(runtime: Runtime, python: str) -> None:
    """Raise EvaluatorError if Python does not work in the sandbox, and RuntimeFailure if the sandbox itself does not
    work.

    Success only shows that the sandbox can be used: an agent may have replaced the sandbox's Python.
    """
    tail, late = "", False
    try:
        done = await runtime.exec(
            [python, "-I", "-S", "-c", f"import sys; sys.stdout.write({READY!r})"], seconds=PROBE_SECONDS
        )
        if done.exit_code == 0 and done.stdout == READY.encode():
            return
        tail, late = done.log_tail(), done.timed_out
    except RuntimeFailure as error:  # for example, the program does not exist.
        await runtime.exec(["true"], seconds=PROBE_SECONDS)  # this call raises if the whole sandbox is broken
        tail = error.message
    raise EvaluatorError(
        f"{python!r} does not run in the sandbox, and the evaluator 'code' needs it",
        hint="use an image that has python3, or name its interpreter: task.evaluator.options.python",
        log_tail=tail or None,
        inside=not late,  # a timeout may be due to a slow host
    )


async def stepped(shell: Shell, text: str, seconds: float) -> dict[str, Any]:
    """Run one step of the Checker (see `guest.py`), and return the event that it prints. Raises TimeoutError, and
    EvaluatorError if the output has no readable event."""
    if seconds <= 0:
        raise TimeoutError
    done: ShellResult = await shell.run(text, seconds=seconds)
    if done.timed_out:
        raise TimeoutError
    events = [line for line in done.output.split("\n") if line.startswith(MARK)]
    try:
        step: dict[str, Any] = json.loads(events[-1].removeprefix(MARK))
    except (IndexError, ValueError, RecursionError) as error:
        raise EvaluatorError("the check says nothing that can be read", log_tail=done.output[-4096:]) from error
    return step


@cache
def guest() -> str:
    return Path(__file__).with_name("guest.py").read_text("utf-8")
