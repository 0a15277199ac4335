"""The end of a program's output, for error records. Pure."""

from __future__ import annotations

from outrider.runtimes.base import ExecResult

TAIL_BYTES = 4096


def log_tail(result: ExecResult, *, limit: int = TAIL_BYTES) -> str:
    """The last `limit` bytes of stdout and stderr, stdout first; each may use what the other leaves free."""
    out, err = result.stdout.rstrip(), result.stderr.rstrip()
    err_room = max(limit // 2, limit - len(out))
    err = err[-err_room:]
    room = limit - len(err)
    out = out[-room:] if room else b""
    return b"\n".join(part for part in (out, err) if part).decode("utf-8", errors="replace")
