"""A storm of sessions in real sandboxes leaves no process, mount, socket, control group or folder."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from outrider.config import LanesConfig
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime

from .sandboxed import ENDINGS, FATES, MARK, NAP
from .storm import add_engines, assert_over, draw, unleash
from .traces import traces
from .world import a_world

SESSIONS = 250
LANES = LanesConfig(init=4, run=12, eval=4)


@pytest.mark.deep
@pytest.mark.timeout(600)
async def test_real_sandboxes_of_every_fate(temporary: Path, tmp_path: Path, tokenizer: Path) -> None:
    if not (can := NamespaceRuntime.available()).ok:
        pytest.skip(f"namespace: {can.detail}")
    rng = random.Random(0)
    before = traces(temporary, MARK, NAP)
    async with a_world(tmp_path, tokenizer, http=True, lanes=LANES) as w:
        idle = traces(temporary, MARK, NAP)
        await add_engines(w, tokenizer, 4, percent=2)
        groups = draw(rng, FATES, SESSIONS)
        begun = time.monotonic()
        views = await unleash(w, rng, groups, spared=len(FATES), cancelled=0.5, within=SESSIONS / 50)
        seconds = time.monotonic() - begun
        endings = await assert_over(w, groups, views)
        during = traces(temporary, MARK, NAP)
        # A process may end while it is examined.
        alive = {one for one in during.processes if one[1] != "ended"}
        assert len(alive - idle.processes) == 1, "the zygote"
        assert alive >= idle.processes
        assert during.mounts == ()
        assert len(during.groups) <= 1  # the node's own group, which contains no other
        assert endings.keys() >= ENDINGS, endings
        print(f"{SESSIONS} sandboxed sessions in {seconds:.1f} s: {dict(endings)}")
    assert traces(temporary, MARK, NAP) == before
