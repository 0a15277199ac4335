"""`python -m outrider.cli.slurm_unfinished FLAGS`: writes the number of unfinished sessions of a stopped service to
standard output. FLAGS are the flags of `outrider serve` with which the service ran.

A batch job runs this module when its time limit is reached.
"""

from __future__ import annotations

import asyncio
import sys

from outrider.cli.slurm import settings_of
from outrider.lifecycle import SessionState


async def main() -> None:
    config = settings_of(sys.argv[1:])
    # The import is here, because a wrong flag is refused without loading the service's libraries.
    from outrider.service.data_folder import open_store

    async with open_store(config) as store:
        counts = await store.counts()
    print(sum(number for state, number in counts.items() if state is not SessionState.DONE))


if __name__ == "__main__":
    asyncio.run(main())
