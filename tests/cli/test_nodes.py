"""`outrider nodes` against a live service."""

from __future__ import annotations

import json
from pathlib import Path

from cli.world import Cli
from support.service import running_service


async def test_a_node_is_listed_drained_and_resumed(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        listed = await cli("nodes", "list", "--url", url)
        assert (listed.code, "node local: 0 sessions" in listed.out) == (0, True)
        assert all(lane in listed.out for lane in ("init", "ready", "run", "eval", "grading"))
        drained = await cli("nodes", "drain", "local", "--url", url)
        assert "drained: it takes no new sessions" in drained.out
        assert "drained" in (await cli("status", "--url", url)).out
        resumed = await cli("nodes", "resume", "local", "--url", url, "--json")
        assert [node["drained"] for node in json.loads(resumed.out)["nodes"]] == [False]
        unknown = await cli("nodes", "drain", "elsewhere", "--url", url)
        assert (unknown.code, "no node 'elsewhere'" in unknown.err, "'local'" in unknown.err) == (2, True, True)
