"""The findings of a run of the fuzzer, for people and as JSON.

Independent of the dialect. Invariant: a failure is shown with everything needed to reproduce it.
"""

from __future__ import annotations

import base64
from typing import Any

from support.fuzz.player import Failure, Tally

SHOWN_BYTES = 2000


def as_json(dialect: str, seed: int, tally: Tally, seconds: float) -> dict[str, Any]:
    return {
        "dialect": dialect,
        "seed": seed,
        "requests": tally.requests,
        "sessions": tally.sessions,
        "seconds": round(seconds, 1),
        "statuses": {str(status): times for status, times in sorted(tally.statuses.items())},
        "kinds": dict(tally.kinds.most_common()),
        "slowest_seconds": round(tally.slowest, 3),
        "sampled": tally.sampled,
        "trained": tally.trained,
        "masked": tally.masked,
        "dropped": tally.dropped,
        "samples": tally.samples,
        "joins": dict(tally.joins.most_common()),
        "branches": dict(tally.branches.most_common()),
        "violations": [_failure(failure) for failure in tally.failures],
    }


def as_table(dialect: str, seed: int, tally: Tally, seconds: float) -> str:
    """Return the findings as text: one line per fact, then the failures."""
    adds_up = "=" if tally.sampled == tally.trained + tally.masked + tally.dropped else "is not"
    rows = [
        ("dialect", dialect),
        ("requests", f"{tally.requests} in {tally.sessions} sessions, {seconds:.0f} s, seed {seed}"),
        ("statuses", _counted(sorted(tally.statuses.items()))),
        ("kinds", _counted(tally.kinds.most_common())),
        ("slowest reply", f"{tally.slowest:.3f} s"),
        (
            "tokens",
            f"sampled {tally.sampled} {adds_up} trained {tally.trained} + masked {tally.masked} + "
            f"dropped {tally.dropped}",
        ),
        ("joins", _counted(tally.joins.most_common())),
        ("rows", f"{tally.samples}: {_counted(tally.branches.most_common())}"),
        ("violations", str(len(tally.failures))),
    ]
    lines = [f"{name:<14} {told}" for name, told in rows]
    for failure in tally.failures:
        lines += ["", *_told(dialect, seed, failure)]
    return "\n".join(lines)


def _told(dialect: str, seed: int, failure: Failure) -> list[str]:
    lines = [
        f"violation: {failure.problem}",
        f"  session {failure.session}, request {failure.number} of it; again with:",
        f"  python scripts/fuzz_gateway.py --dialect {dialect} --seed {seed} --session {failure.session}",
    ]
    if (request := failure.request) is not None:
        body = b"".join(request.pieces)
        lines += [
            f"  {request.method} {request.path!r} query {request.query!r} headers {request.headers!r}",
            f"  body ({len(body)} bytes) {body[:SHOWN_BYTES]!r}",
        ]
    if failure.shrunk is not None:
        lines.append(f"  the smallest body that fails by itself: {failure.shrunk[:SHOWN_BYTES]!r}")
    return lines


def _failure(failure: Failure) -> dict[str, Any]:
    found: dict[str, Any] = {"problem": failure.problem, "session": failure.session, "number": failure.number}
    if (request := failure.request) is not None:
        found["request"] = {
            "method": request.method,
            "path": request.path,
            "query": request.query.decode("latin-1"),
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.headers],
            "body_base64": base64.b64encode(b"".join(request.pieces)).decode(),
        }
    if failure.shrunk is not None:
        found["shrunk_base64"] = base64.b64encode(failure.shrunk).decode()
    return found


def _counted(items: Any) -> str:
    return ", ".join(f"{name} {times}" for name, times in items) or "none"
