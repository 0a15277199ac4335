"""The program Apptainer on this machine, or Singularity, as it was called before.

It does not know what it is wanted for, nor whether it works. Invariant: what is returned is a program on the PATH.
"""

from __future__ import annotations

import shutil

from outrider.errors import RuntimeUnavailable

PROGRAMS = ("apptainer", "singularity")


def apptainer_program() -> str:
    """The path of the program. Raises RuntimeUnavailable with a hint of how to get it."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        raise RuntimeUnavailable(
            "apptainer is not installed",
            hint="on a cluster: `module load apptainer`; else your distribution's package, or apptainer.org",
        )
    return program
