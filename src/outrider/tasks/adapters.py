"""Makes examples from the rows of data sets. ADAPTERS maps a kind of data set to its adapter, a function that makes a
task from a row. A new kind needs a function and a line in ADAPTERS.

The module downloads nothing. Invariant: the examples are in the order of the rows. If two rows have the same id, the
second example has a fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from outrider.errors import InvalidField
from outrider.tasks.answer_sets import nemo_gym, verl
from outrider.tasks.dataset_rows import Adapter, Additions
from outrider.tasks.drafts import example_of, sentence
from outrider.tasks.examples import Example, Fault
from outrider.tasks.swe_sets import r2e_gym, swe_gym, swe_rebench, swe_smith, swebench_pro
from outrider.tasks.swebench import swebench, swebench_rows

ADAPTERS: dict[str, Adapter] = {
    "swebench": swebench,
    "swe-gym": swe_gym,
    "swe-rebench": swe_rebench,
    "swe-smith": swe_smith,
    "r2e-gym": r2e_gym,
    "swebench-pro": swebench_pro,
    "verl": verl,
    "nemo-gym": nemo_gym,
}


def adapted_examples(kind: str, source: Path, given: Additions, *, limit: int | None = None) -> list[Example]:
    """Return an example for each row, including rows with faults. Raises InvalidField for an unknown kind, and for a
    file that cannot be read."""
    if kind not in ADAPTERS:
        raise InvalidField(
            f"there is no kind of rows {kind!r}", field="kind", hint=f"the kinds are {', '.join(ADAPTERS)}"
        )
    rows = list(swebench_rows(source))[:limit]
    examples: list[Example] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        example = example_of(ADAPTERS[kind], row, given, f"row {number} of {source}", number)
        if example.id in seen and not example.faults:
            problem = f"is {example.id!r}, as in row {seen[example.id]}"
            fault = Fault("instance_id", problem, "leave one of the rows out")
            example = msgspec.structs.replace(example, faults=(fault,))
        seen.setdefault(example.id, number)
        examples.append(example)
    return examples


def usable(examples: Iterable[Example], source: str) -> list[Example]:
    """Return the examples if none has a fault. Otherwise, raise InvalidField for the first fault, with the number of
    faulty rows."""
    every = list(examples)
    broken = [number for number, example in enumerate(every) if example.faults]
    if not broken:
        return every
    fault = every[broken[0]].faults[0]
    more = f", and {len(broken) - 1} more rows have faults" if len(broken) > 1 else ""
    raise InvalidField(
        f"{sentence(fault, f'row {broken[0]} of {source}')}{more}",
        field=fault.column,
        hint=f"{fault.remedy}; `outrider task list {source}` lists every fault",
    )
