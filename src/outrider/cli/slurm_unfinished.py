"""`python -m outrider.cli.slurm_unfinished SERVE FLAGS`: writes the number of unfinished sessions of a stopped
service with these flags to standard output.

A batch job runs this module when its time limit is reached.
"""

from __future__ import annotations

import asyncio
import sys

from outrider.cli.slurm import settings_of
from outrider.config import Config
from outrider.lifecycle import SessionState


def main() -> None:
    print(asyncio.run(_count(settings_of(sys.argv[1:]))))


async def _count(config: Config) -> int:
    # The import is here, because the command line does not need the service's libraries to parse its flags.
    from outrider.service.assembly import open_store

    async with open_store(config) as store:
        counts = await store.counts()
    return sum(number for state, number in counts.items() if state is not SessionState.DONE)


if __name__ == "__main__":
    main()
