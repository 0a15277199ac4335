"""Release pairs without the network: the error messages if pip hangs or fails."""

from __future__ import annotations

import pytest

from outrider.errors import InvalidField
from outrider.tasks.release_pairs import pip


def test_a_pip_that_takes_too_long_is_named() -> None:
    with pytest.raises(InvalidField, match=r"pip list did not end within 0\.01 s"):
        pip("list", seconds=0.01)


def test_the_end_of_pips_output_is_told() -> None:
    with pytest.raises(InvalidField, match=r"pip nothing failed: .*unknown command"):
        pip("nothing")
