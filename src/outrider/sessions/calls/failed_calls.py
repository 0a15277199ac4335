"""The failed model calls that a session has not gone on from: what its run ends with, if it ends now.

A session goes on from a failed call with a later one: one that began after the failure, and has ended. If that fails,
too, it takes the place of the first. A call that was under way beside the failed one says nothing, and neither does a
call without tools about one that offered them: agents ask for a title, or what to call a branch, beside their work, and
go on asking when their work has failed.
"""

from __future__ import annotations

import msgspec

from outrider.errors import ContextOverflow, OutriderError


class _Failed(msgspec.Struct, frozen=True):
    """`begun` is how many calls had begun when it failed."""

    error: OutriderError
    begun: int
    tools: bool


class FailedCalls:
    """`number = begin()` as a call begins, then `ended(number, ...)`, unless its client was at fault or gave it up."""

    def __init__(self) -> None:
        self._begun = 0
        self._failed: list[_Failed] = []

    def begin(self) -> int:
        """The number of a call that begins now."""
        self._begun += 1
        return self._begun

    def ended(self, number: int, *, tools: bool, error: OutriderError | None = None) -> None:
        """A call succeeded, or failed with `error`. `tools`: whether it is known to have offered any."""
        self._failed = [one for one in self._failed if number <= one.begun or (one.tools and not tools)]
        if error is not None:
            self._failed.append(_Failed(error, self._begun, tools))

    def forget(self) -> None:
        """Another step of the task begins."""
        self._failed.clear()

    @property
    def error(self) -> OutriderError | None:
        """The newest failure of an engine, which must not be graded; if there is none, a prompt that was too long."""
        errors = [one.error for one in reversed(self._failed)]
        return next((error for error in errors if not isinstance(error, ContextOverflow)), next(iter(errors), None))
