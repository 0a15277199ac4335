"""Finds the program Apptainer, or Singularity (its former name), on this machine.

The program is not started: a program that does not work is returned, too. Invariant: the returned path is a program on
the PATH.
"""

from __future__ import annotations

import shutil

from outrider.errors import RuntimeUnavailable

PROGRAMS = ("apptainer", "singularity")


def apptainer_program() -> str:
    """Return the path of the program. Raises RuntimeUnavailable with a hint for its installation."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        raise RuntimeUnavailable(
            "apptainer is not installed",
            hint="on a cluster: `module load apptainer`; else your distribution's package, or apptainer.org",
        )
    return program
