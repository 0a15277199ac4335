"""The cases of a `code` task: inputs of a program and its expected outputs. The module is pure.

Invariant: expected outputs never enter a sandbox. The node compares them as text or as values of built-in types.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, model_validator

from outrider.errors import InvalidField
from outrider.spec import Name, SandboxPath, Seconds, Spec, Text

MAX_VALUES = 1 << 22
MAX_CONTAINERS = 1 << 20
"""Maximum numbers of values (MAX_VALUES), and of objects and lists (MAX_CONTAINERS), in cases given as text. They limit
the memory: a parsed object needs 250 bytes, even if its text has only a few bytes."""


class CodeOptions(Spec):
    """Options of kind `code`. A task gives either `inputs` and `outputs`, of equal length, or `test` with
    `entry_point`.

    file: path of the program in the sandbox. None means the last fenced code block in the agent's final answer.
    inputs, outputs: the input and the expected output of each case. With `fn_name`, these are the arguments and the
        result of the function with this name: JSON values, or text with one JSON value per line.
    prompt, entry_point, test: fields of a row of HumanEval. `test` defines `check(candidate)`.
    reward: `all` gives 1 if every case passes, and stops at the first failure. `share` gives the fraction of passing
        cases.
    case_seconds: time limit of one run of the program.
    total_seconds: time limit of all runs and the check together. The default is three quarters of
        `task.evaluator.seconds`.
    output_bytes: output limit of one run.
    python: the interpreter in the sandbox.
    """

    file: SandboxPath | None = None
    inputs: Annotated[tuple[Any, ...], Field(strict=False, max_length=10_000)] = ()
    outputs: Annotated[tuple[Any, ...], Field(strict=False, max_length=10_000)] = ()
    fn_name: Name | None = None
    prompt: Text = ""
    entry_point: Name | None = None
    test: Text | None = None
    reward: Literal["all", "share"] = "all"
    case_seconds: Seconds = 10
    total_seconds: Seconds | None = None
    output_bytes: Annotated[int, Field(ge=1, le=8 << 20)] = 1 << 20
    python: Name = "python3"

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.test is None) != (self.entry_point is None):
            raise ValueError("'test' and 'entry_point' belong together")
        if (self.test is None) == (not self.inputs):
            raise ValueError("give either 'inputs' and 'outputs', or 'test' and 'entry_point'")
        if len(self.inputs) != len(self.outputs):
            raise ValueError(f"there are {len(self.inputs)} inputs and {len(self.outputs)} outputs")
        return self


class Case(msgspec.Struct, frozen=True):
    """One case. `given` is the program's standard input as text, or the list of a function's arguments. `accepted` are
    the right results: lists of lines (see `lines`) for a program, or values for a function."""

    given: Any
    accepted: tuple[Any, ...]

    def accepts(self, answer: Any) -> bool:
        """Return True if `answer` is right. Raises RecursionError for a deeply nested value."""
        return any(answer == right for right in self.accepted)


def lines(text: str) -> list[str]:
    """Return the lines of an output, without trailing spaces and trailing empty lines."""
    found = [line.rstrip() for line in text.split("\n")]
    while found and not found[-1]:
        found.pop()
    return found


def json_value(coded: Any) -> Any:
    """Decode a value that `guest.encode` encoded. Tuples become lists, because JSON has no tuples. Raises ValueError or
    TypeError for values of types that JSON does not have, and RecursionError for deep nesting.

    Never build sets, or dicts with keys other than strings: the candidate (the program under test) could choose numbers
    with equal hashes, and building such a hash table would take minutes.
    """
    if isinstance(coded, list):
        return [json_value(one) for one in coded]
    if not isinstance(coded, dict):
        return coded
    [(kind, inner)] = coded.items()
    if kind == "tuple" and isinstance(inner, list):
        return [json_value(one) for one in inner]
    if kind == "dict" and all(isinstance(key, str) for key, _ in inner):
        return {key: json_value(one) for key, one in inner}
    raise ValueError(f"a {kind} is no value of JSON")


def cases_of(options: CodeOptions) -> list[Case]:
    """Return the cases of a task that has `inputs` and `outputs`. Raises InvalidField for invalid cases, and for cases
    that an empty program would pass."""
    cases: list[Case] = []
    # Many rows of APPS and TACO wrap the result of a function in a list. So if every output is a list of one value, the
    # bare value also passes.
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in options.outputs)
    if options.fn_name is not None:
        _check_size([text for text in (*options.inputs, *options.outputs) if isinstance(text, str)])
    for number, (given, output) in enumerate(zip(options.inputs, options.outputs, strict=True)):
        field = f"task.evaluator.options.inputs.{number}"
        if options.fn_name is None:
            texts = ["\n".join(map(str, one)) if isinstance(one, list) else one for one in (given, output)]
            if not all(isinstance(text, str) for text in texts):
                raise InvalidField("input and output must be texts, or lists of lines", field=field)
            cases.append(Case(texts[0], (lines(texts[1]),)))
            if options.reward == "share" and not cases[-1].accepted[0]:
                raise InvalidField(
                    "is empty: a program that does nothing would be paid for this case",
                    field=f"task.evaluator.options.outputs.{number}",
                    hint="leave the case out, or take reward 'all'",
                )
        elif isinstance(given, str):  # LiveCodeBench's format
            try:
                cases.append(Case([json.loads(line) for line in lines(given)], (json.loads(output),)))
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidField(f"is not a JSON value a line: {error}", field=field) from error
        elif isinstance(given, list):
            cases.append(Case(given, (output, output[0]) if wrapped else (output,)))
        else:
            raise InvalidField("must be the list of the function's arguments", field=field)
    if options.fn_name is None and not any(case.accepted[0] for case in cases):
        raise InvalidField(
            "every expected output is empty: a program that does nothing would pass",
            field="task.evaluator.options.outputs",
        )
    return cases


def _check_size(texts: list[str]) -> None:
    """Raise InvalidField if the texts have more than MAX_VALUES commas or MAX_CONTAINERS opening brackets."""
    for what, signs, most in (("values", ",", MAX_VALUES), ("objects and lists", "{[", MAX_CONTAINERS)):
        if (count := sum(text.count(sign) for text in texts for sign in signs)) > most:
            raise InvalidField(
                f"the cases have some {count} {what} as text; the maximum is {most}",
                field="task.evaluator.options.inputs",
            )
