"""Records the failed model calls of a session until later calls make up for them. A run that ends before then ends with
the error of such a call.

A call that begins after the failure makes up for a failed call once it has ended. If the later call fails, too, the
later failure takes the place of the earlier one. A call that was under way at the time of the failure has no effect. A
call without tools does not make up for a failed call with tools: agents request a title, or a name for a branch, beside
their work, and still do so when the work has failed.
"""

from __future__ import annotations

import msgspec

from outrider.errors import ContextOverflow, OutriderError


class _Failed(msgspec.Struct, frozen=True):
    """A failed call. `begun` is the number of calls that had begun when the call failed."""

    error: OutriderError
    begun: int
    tools: bool


class FailedCalls:
    """The record of one session's failed calls: `number = begin()` as a call begins, then `ended(number, ...)`, unless
    the client was at fault or gave the call up."""

    def __init__(self) -> None:
        self._begun = 0
        self._failed: list[_Failed] = []

    def begin(self) -> int:
        """Return the number of a call that begins now."""
        self._begun += 1
        return self._begun

    def ended(self, number: int, *, tools: bool, error: OutriderError | None = None) -> None:
        """Record that a call succeeded, or failed with `error`. `tools`: whether the call is known to have offered
        tools."""
        self._failed = [one for one in self._failed if number <= one.begun or (one.tools and not tools)]
        if error is not None:
            self._failed.append(_Failed(error, self._begun, tools))

    def clear(self) -> None:
        """Clear the record, because another step of the task begins."""
        self._failed.clear()

    @property
    def error(self) -> OutriderError | None:
        """The newest failure of an engine, which must not be graded; if there is none, a prompt that was too long."""
        errors = [one.error for one in reversed(self._failed)]
        return next((error for error in errors if not isinstance(error, ContextOverflow)), next(iter(errors), None))
