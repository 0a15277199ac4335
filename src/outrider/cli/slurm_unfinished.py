"""`python -m outrider.cli.slurm_unfinished FLAGS`: prints how many sessions a stopped service has not finished. FLAGS
are the flags of `outrider serve` with which the service ran.

A batch job runs this module when it reaches its time limit.
"""

from __future__ import annotations

import asyncio
import sys

from outrider.cli.slurm import settings_of
from outrider.lifecycle import SessionState


async def main() -> None:
    config = settings_of(sys.argv[1:])
    # Imported here, so that a wrong flag is refused before the libraries of the service are loaded.
    from outrider.service.data_folder import open_store

    async with open_store(config) as store:
        counts = await store.counts()
    print(sum(number for state, number in counts.items() if state is not SessionState.DONE))


if __name__ == "__main__":
    asyncio.run(main())
