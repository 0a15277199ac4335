"""docs/nodes.md lists the rules by which the service checks the messages of nodes, and the bounds of a connection."""

from __future__ import annotations

import pytest

from outrider.engines import gates
from outrider.nodes import calls, claims, messages, remote_node
from outrider.sessions import resources
from outrider.wire import decoding, resumable

from .pages import page

PAGE = page("docs/nodes.md")
TABLES = {
    "Of a result": claims.RESULT_RULES,
    "Of a turn": claims.TURN_RULES + claims.IMAGE_RULES,
    "Of a list of artifacts": claims.INDEX_RULES,
}


@pytest.mark.parametrize("first", TABLES)
def test_every_rule_is_there_in_its_order(first: str) -> None:
    [table] = PAGE.tables(first)
    assert table.rows == tuple((rule.what, rule.bound) for rule in TABLES[first])  # type: ignore[attr-defined]


def test_the_bounds_of_a_connection_are_those_of_the_code() -> None:
    [table] = PAGE.tables("Of a connection")
    said = {row[0]: row[1] for row in table.rows}
    mib = 1 << 20
    for what, numbers in {
        "a hello": (messages.MAX_HELLO >> 10, resources.MAX_GPUS),
        "a message": (messages.MAX_FROM_NODE // mib, resumable.PIECE >> 10, decoding.MAX_COST, decoding.MAX_DEPTH),
        "calls without an answer": (calls.MAX_CALLS, calls.MAX_CALL_BYTES // mib),
        "messages that nobody has read yet": (resumable.MAX_UNREAD // mib,),
        "answers that the node does not take": (resumable.MAX_UNACKNOWLEDGED // mib, int(remote_node.WAITS.silence)),
        "generations through the service": (remote_node.MAX_GENERATIONS, remote_node.MAX_GENERATION_BYTES // mib),
        "resources set aside, or waited for": (remote_node.SPARE_TAKES,),
        "artifacts of an attempt": (claims.MAX_KEPT_BYTES // mib,),
        "a report": (claims.MAX_SESSIONS, claims.MAX_LANES, claims.MAX_FAILING, claims.MAX_COUNTED),
        "an attempt that is cancelled": (int(remote_node.WAITS.cancel),),
        "a pause of the policy": (int(gates.ANSWER_SECONDS), int(gates.SETTLE_SECONDS) // 60),
    }.items():
        for number in numbers:
            assert f"{number:,}" in said[what], what
