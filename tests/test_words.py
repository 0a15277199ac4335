"""The words of layer 0: states and their moves, errors and their records, names and what they resolve to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider import plugins
from outrider.errors import Boundary, InvalidField, OutriderError, ServiceError, error_from, record_of
from outrider.lifecycle import MOVES, SessionState, can_move
from outrider.sessions.calls.token_allowance import LimitReached
from outrider.trajectory import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs


def test_every_state_has_its_moves_and_all_lead_to_done() -> None:
    assert set(MOVES) == set(SessionState)
    assert MOVES[SessionState.DONE] == frozenset()
    reachable, frontier = {SessionState.QUEUED}, [SessionState.QUEUED]
    while frontier:
        for state in MOVES[frontier.pop()] - reachable:
            reachable.add(state)
            frontier.append(state)
    assert reachable == set(SessionState)
    assert all(state is SessionState.DONE or can_move(state, SessionState.DONE) for state in SessionState)


def every_error(kind: type[OutriderError] = OutriderError) -> list[type[OutriderError]]:
    """Without those that go by the code of a more general one outside of their process."""
    found = [child for direct in kind.__subclasses__() for child in (direct, *every_error(direct))]
    return [child for child in found if "code" in vars(child)]


@pytest.mark.parametrize("kind", [kind for kind in every_error() if kind is not LimitReached])
def test_an_error_survives_its_record(kind: type[OutriderError]) -> None:
    error = kind("what happened", hint="what to do", field="task.x", log_tail="the end")
    again = error_from(error.record())
    assert type(again) is kind
    assert again.record() == error.record()


def test_codes_tell_errors_apart() -> None:
    codes = [kind.code for kind in every_error()]
    assert len(codes) == len(set(codes))


def test_a_record_from_a_newer_version_is_still_an_error() -> None:
    record = ServiceError("x").record()
    assert type(error_from(type(record)(boundary=Boundary.ENGINE, code="from_the_future", message="x"))) is ServiceError


def test_a_bug_is_recorded_as_one() -> None:
    record = record_of(ZeroDivisionError("division by zero"))
    assert (record.code, record.retryable) == ("internal_error", True)
    assert "ZeroDivisionError" in record.message


@pytest.mark.parametrize("kind", sorted(plugins.BUILTINS))
def test_every_built_in_resolves(kind: str) -> None:
    for name in plugins.BUILTINS[kind]:
        assert plugins.resolve(kind, name) is not None


@pytest.mark.parametrize("name", ["nothing", "no.such.module:thing", "os:no_such", "os.path:", ":x"])
def test_an_unknown_name_is_refused_with_its_field(name: str) -> None:
    with pytest.raises(InvalidField) as refused:
        plugins.resolve("engine", name, field="kind")
    assert refused.value.field == "kind"


def test_a_published_name_is_resolved_and_refused_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[outrider.theirs]\ngood = os.path:join\nbad = theirs_broken:Thing\n")
    (tmp_path / "theirs_broken.py").write_text("raise SystemExit('I thought I was a program')")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.names("theirs") == ["bad", "good"]
    assert plugins.resolve("theirs", "good") is os.path.join
    with pytest.raises(InvalidField, match="I thought I was a program") as refused:
        plugins.resolve("theirs", "bad", field="kind")
    assert refused.value.field == "kind"


def test_packing_keeps_ids_and_logprobs_exactly() -> None:
    ids, logprobs = [0, 1, 2**31 - 1], [-0.1, -1e-300, 0.0, float(-(10**9)) / 7]
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert unpack_logprobs(pack_logprobs(logprobs)).tolist() == logprobs
