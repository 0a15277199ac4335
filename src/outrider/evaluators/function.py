"""The evaluator `callable`: passes the outcome to a Python function, or to any other callable, in the node's own
process.

Invariant: if a function that is not async hangs, it blocks only its own thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from outrider.errors import LOG_TAIL, EvaluatorError, InvalidField, OutriderError
from outrider.evaluators.base import Outcome
from outrider.evaluators.verdict import read_verdict
from outrider.plugins import plugin_code, resolve
from outrider.spec import EvaluatorSpec
from outrider.trajectory import Verdict


class CallableEvaluator:
    """Calls the function that `path` names, and passes the Outcome to it. `path` is an `outrider.reward` entry point or
    `package.module:attribute`. The function finds its options in `outcome.task.evaluator.options`. If it is not async,
    it runs in a thread.

    The function returns a finite number, a mapping with `reward` and other fields of a Verdict, or a Verdict. An
    OutriderError from the function is raised unchanged. Any other exception becomes an EvaluatorError with the end of
    the traceback.
    """

    def __init__(self, spec: EvaluatorSpec) -> None:
        if spec.run is not None:
            raise InvalidField("evaluator kind 'callable' does not take it", field="task.evaluator.run")
        self._path = spec.path or ""
        self._function = resolve("reward", self._path, field="task.evaluator.path")
        if not callable(self._function):
            raise InvalidField(f"{self._path!r} is not callable", field="task.evaluator.path")
        self._seconds = spec.seconds

    async def evaluate(self, outcome: Outcome) -> Verdict:
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                with plugin_code():
                    value = await self._call(outcome)
        except OutriderError:
            raise
        except Exception as error:  # code of users may raise anything
            if limit.expired():
                message = f"{self._path} did not end within {self._seconds:g} s"
                raise EvaluatorError(message, hint="make it faster, or raise task.evaluator.seconds") from error
            tail = "".join(traceback.format_exception(type(error), error, _of_user(error)))[-LOG_TAIL:]
            message = f"{self._path} raised {type(error).__name__}: {error}"
            raise EvaluatorError(
                message, log_tail=tail, hint="after a change of its module, restart the service, which has imported it"
            ) from error
        try:
            return read_verdict(value)
        except ValueError as error:
            raise EvaluatorError(
                f"{self._path} returned no verdict: {error}",
                hint="return a finite number, a mapping with 'reward', or a Verdict",
            ) from error

    async def _call(self, outcome: Outcome) -> Any:
        function = self._function
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await function(outcome)
        value = await _in_thread(lambda: function(outcome))
        return await value if inspect.isawaitable(value) else value


def _of_user(error: Exception) -> TracebackType | None:
    """Return the error's traceback without the first frames, those of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run the call in a new daemon thread and return its result. If the caller is cancelled, the thread runs on.

    The event loop's executor is not used, because hanging functions would gradually occupy all its threads.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            done.set_exception(error)
        else:
            # Convert the exception: a future does not accept StopIteration, and SystemExit would end the event loop
            # instead of the function's thread.
            done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(call)
        except BaseException as raised:  # this includes SystemExit, because the caller waits for a result
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="outrider-evaluator", daemon=True).start()
    return await done
