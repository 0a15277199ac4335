"""Records a session's failed model calls until later calls make up for the failures. If the run ends while a failed
call is recorded, the run has the error of this call.

A later call makes up for a failed call if the later call begins after the failure and succeeds. If the later call fails
as well, the later failure replaces the earlier failure. A call that was already running at the time of the failure has
no effect. A call without tools does not make up for a failed call with tools, because agents request titles and branch
names beside their work, and still do so when the work has failed.
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
    """The record of one session's failed calls. `begin` is called when a call begins. `ended` is called with the
    returned number when the call has ended, unless the client caused the error or gave the call up."""

    def __init__(self) -> None:
        self._begun = 0
        self._failed: list[_Failed] = []

    def begin(self) -> int:
        """Return the number of a call that begins now."""
        self._begun += 1
        return self._begun

    def ended(self, number: int, *, tools: bool, error: OutriderError | None = None) -> None:
        """Record that a call succeeded, or failed with `error`. `tools` is True if the call is known to have offered
        tools."""
        self._failed = [one for one in self._failed if number <= one.begun or (one.tools and not tools)]
        if error is not None:
            self._failed.append(_Failed(error, self._begun, tools))

    def clear(self) -> None:
        """Clear the record, because another step of the task begins."""
        self._failed.clear()

    @property
    def error(self) -> OutriderError | None:
        """The newest recorded error of an engine, because of which the run must not be graded. If there is no such
        error, the newest error of a prompt that was too long, or None."""
        errors = [one.error for one in reversed(self._failed)]
        return next((error for error in errors if not isinstance(error, ContextOverflow)), next(iter(errors), None))
