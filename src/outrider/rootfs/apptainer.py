"""Where Apptainer is on this machine, or Singularity, as it was called before.

It does not know what it is wanted for, nor whether it works. Invariant: what is found is a program on the PATH.
"""

from __future__ import annotations

import shutil

from outrider.errors import RuntimeUnavailable

PROGRAMS = ("apptainer", "singularity")


def apptainer_program() -> str:
    """Raises RuntimeUnavailable with what to do about it."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        raise RuntimeUnavailable(
            "apptainer is not installed",
            hint="on a cluster: `module load apptainer`; else your distribution's package, or apptainer.org",
        )
    return program
