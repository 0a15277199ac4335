"""A very small shell over files in memory: what tests and the built-in agent use of bash, and no more.

It knows no processes and no host; `sleep` is its only wait. Invariant: what it cannot do is answered as bash would
answer (an exit code and a text), never by an exception.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Mapping, Sequence

import msgspec

from outrider.testing.memory_runtime.files import FileTable
from outrider.testing.memory_runtime.shell_syntax import Pipeline, ShellSyntaxError, Simple, parse


class Output(msgspec.Struct, frozen=True):
    code: int = 0
    out: bytes = b""
    err: bytes = b""


class ShellExit(Exception):
    """`exit` was called with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class MemoryShell:
    """Variables, a working directory, and the commands as methods `cmd_NAME(arguments, stdin)`.

    `out` and `err` are one buffer when `merged`. After an `exit` it is `ended`.
    """

    def __init__(self, files: FileTable, env: Mapping[str, str], cwd: str, *, merged: bool) -> None:
        self.files = files
        self.env = dict(env)
        self.variables = dict(env)
        self.cwd = cwd
        self.out = bytearray()
        self.err = self.out if merged else bytearray()
        self.ended = False
        self._status = 0

    async def run(self, text: str, stdin: bytes = b"") -> int:
        """Run to the end; output is added to `out` and `err`."""
        try:
            for pipeline in parse(text):
                if (pipeline.connector == "&&" and self._status) or (pipeline.connector == "||" and not self._status):
                    continue
                self._status = await self._pipeline(pipeline, stdin)
        except ShellSyntaxError as error:
            self.err += f"bash: {error}\n".encode()
            self._status = 2
        except ShellExit as stop:
            self.ended = True
            self._status = stop.code
        return self._status

    async def run_argv(self, argv: Sequence[str], stdin: bytes = b"") -> int:
        """One command given as words."""
        try:
            self._status = self._emit(await self._command(list(argv), stdin))
        except ShellExit as stop:
            self._status = stop.code
        return self._status

    def path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.cwd, name))

    async def _pipeline(self, pipeline: Pipeline, stdin: bytes) -> int:
        result = Output(out=stdin)
        for command in pipeline.commands:
            result = await self._simple(command, result.out)
            if command is not pipeline.commands[-1]:
                self.err += result.err
        return self._emit(result)

    def _emit(self, result: Output) -> int:
        self.out += result.out
        self.err += result.err
        return result.code

    async def _simple(self, command: Simple, stdin: bytes) -> Output:
        scope = {**self.variables, "?": str(self._status)}
        leading = next((i for i, word in enumerate(command.words) if not word.assigns), len(command.words))
        assigned = dict(word.value(scope).split("=", 1) for word in command.words[:leading])
        argv = [word.value(scope) for word in command.words[leading:] if not word.vanishes(scope)]
        try:
            stdin = self._input(command, scope, stdin)
            if not argv:
                self.variables.update(assigned)
                self.env.update({name: value for name, value in assigned.items() if name in self.env})
                return self._redirect(command, scope, Output())
            saved = dict(self.env)
            self.env.update(assigned)
            try:
                return self._redirect(command, scope, await self._command(argv, stdin))
            finally:
                if assigned:
                    self.env = saved
        except OSError as error:
            return Output(1, err=f"bash: {error.args[0]}: {reason(error)}\n".encode())

    def _input(self, command: Simple, scope: Mapping[str, str], stdin: bytes) -> bytes:
        for operator, target in command.redirects:
            if operator == "<" and target is not None:
                stdin = self.files.read(self.path(target.value(scope)))
        return stdin

    def _redirect(self, command: Simple, scope: Mapping[str, str], result: Output) -> Output:
        """Send the two streams where the redirections say, from left to right."""
        places: list[str] = ["1", "2"]
        for operator, target in command.redirects:
            source = 1 if operator.startswith("2") else 0
            if target is None:
                places[source] = places[int(operator[-1]) - 1]
            elif operator != "<":
                path = self.path(target.value(scope))
                self._open(path, append=operator.endswith(">>"))
                places[source] = path
        kept = {"1": b"", "2": b""}
        for place, data in zip(places, (result.out, result.err), strict=True):
            if place in kept:
                kept[place] += data
            elif place != "/dev/null":
                self.files.write(place, data, append=True)
        return Output(result.code, kept["1"], kept["2"])

    def _open(self, path: str, *, append: bool) -> None:
        if path != "/dev/null":
            self.files.write(path, b"", append=append)

    async def _command(self, argv: list[str], stdin: bytes) -> Output:
        name = {"[": "test", ":": "true"}.get(argv[0], posixpath.basename(argv[0]))
        method = getattr(self, f"cmd_{name}", None)
        if method is None:
            return Output(127, err=f"bash: {argv[0]}: command not found\n".encode())
        try:
            result: Output = await method(argv[1:], stdin)
        except OSError as error:
            return Output(1, err=f"{argv[0]}: {error.args[0]}: {reason(error)}\n".encode())
        return result

    async def cmd_true(self, args: list[str], stdin: bytes) -> Output:
        return Output()

    async def cmd_false(self, args: list[str], stdin: bytes) -> Output:
        return Output(1)

    async def cmd_exit(self, args: list[str], stdin: bytes) -> Output:
        raise ShellExit(int(args[0]) & 0xFF if args else self._status)

    async def cmd_echo(self, args: list[str], stdin: bytes) -> Output:
        end = "" if args[:1] == ["-n"] else "\n"
        return Output(out=(" ".join(args[1:] if end == "" else args) + end).encode())

    async def cmd_printf(self, args: list[str], stdin: bytes) -> Output:
        if not args:
            return Output(2, err=b"printf: usage: printf format [arguments]\n")
        return Output(out=formatted(args[0], args[1:]).encode())

    async def cmd_cat(self, args: list[str], stdin: bytes) -> Output:
        out, err = b"", ""
        for name in args or ["-"]:
            try:
                out += stdin if name == "-" else self.files.read(self.path(name))
            except OSError as error:
                err += f"cat: {name}: {reason(error)}\n"
        return Output(1 if err else 0, out, err.encode())

    async def cmd_test(self, args: list[str], stdin: bytes) -> Output:
        words = [word for word in args if word != "]"]
        negated = words[:1] == ["!"]
        return Output(int(self._holds(words[negated:]) == negated))

    def _holds(self, words: list[str]) -> bool:
        match words:
            case ["-f", name]:
                return self.files.is_file(self.path(name))
            case ["-d", name]:
                return self.files.is_folder(self.path(name))
            case ["-e", name]:
                return self.files.is_file(self.path(name)) or self.files.is_folder(self.path(name))
            case ["-s", name]:
                return self.files.is_file(self.path(name)) and bool(self.files.read(self.path(name)))
            case ["-n", value] | [value]:
                return bool(value)
            case ["-z", value]:
                return not value
            case [left, "=" | "==", right]:
                return left == right
            case [left, "!=", right]:
                return left != right
            case [left, "-eq", right]:
                return left == right
        return False

    async def cmd_sleep(self, args: list[str], stdin: bytes) -> Output:
        await asyncio.sleep(float(args[0]))
        return Output()

    async def cmd_pwd(self, args: list[str], stdin: bytes) -> Output:
        return Output(out=f"{self.cwd}\n".encode())

    async def cmd_cd(self, args: list[str], stdin: bytes) -> Output:
        goal = self.path(args[0] if args else self.env.get("HOME", "/"))
        if not self.files.is_folder(goal):
            return Output(1, err=f"bash: cd: {args[0]}: No such file or directory\n".encode())
        self.cwd = goal
        return Output()

    async def cmd_env(self, args: list[str], stdin: bytes) -> Output:
        return Output(out="".join(f"{name}={value}\n" for name, value in self.env.items()).encode())

    async def cmd_printenv(self, args: list[str], stdin: bytes) -> Output:
        if not args:
            return await self.cmd_env(args, stdin)
        found = [self.env[name] for name in args if name in self.env]
        return Output(int(len(found) < len(args)), "".join(f"{value}\n" for value in found).encode())

    async def cmd_export(self, args: list[str], stdin: bytes) -> Output:
        for item in args:
            name, equals, value = item.partition("=")
            self.variables[name] = self.env[name] = value if equals else self.variables.get(name, "")
        return Output()

    async def cmd_mkdir(self, args: list[str], stdin: bytes) -> Output:
        for name in [arg for arg in args if not arg.startswith("-")]:
            path = self.path(name)
            if "-p" not in args and (self.files.is_folder(path) or self.files.is_file(path)):
                return Output(1, err=f"mkdir: cannot create directory '{name}': File exists\n".encode())
            self.files.make_folder(path)
        return Output()

    async def cmd_rm(self, args: list[str], stdin: bytes) -> Output:
        flags = "".join(arg for arg in args if arg.startswith("-"))
        for name in [arg for arg in args if not arg.startswith("-")]:
            path = self.path(name)
            if self.files.is_folder(path) and "r" not in flags:
                return Output(1, err=f"rm: cannot remove '{name}': Is a directory\n".encode())
            if not self.files.is_folder(path) and not self.files.is_file(path) and "f" not in flags:
                return Output(1, err=f"rm: cannot remove '{name}': No such file or directory\n".encode())
            self.files.remove(path)
        return Output()

    async def cmd_ls(self, args: list[str], stdin: bytes) -> Output:
        out = ""
        for name in [arg for arg in args if not arg.startswith("-")] or ["."]:
            path = self.path(name)
            if self.files.is_file(path):
                out += f"{name}\n"
            elif self.files.is_folder(path):
                inside = [posixpath.relpath(entry, path) for entry in self.files.below(path)]
                out += "".join(f"{entry}\n" for entry in inside if "/" not in entry)
            else:
                return Output(2, err=f"ls: cannot access '{name}': No such file or directory\n".encode())
        return Output(out=out.encode())

    async def cmd_bash(self, args: list[str], stdin: bytes) -> Output:
        inner = MemoryShell(self.files, self.env, self.cwd, merged=False)
        code = await inner.run(args[1] if args[:1] == ["-c"] and len(args) > 1 else stdin.decode(), stdin)
        return Output(code, bytes(inner.out), bytes(inner.err))

    cmd_sh = cmd_bash


def reason(error: OSError) -> str:
    """What strerror says of the errors that files in memory have."""
    texts = {
        FileNotFoundError: "No such file or directory",
        IsADirectoryError: "Is a directory",
        FileExistsError: "File exists",
    }
    return texts.get(type(error), "Input/output error")


def formatted(form: str, values: list[str]) -> str:
    """printf with %s, %d and the usual backslashes; the format is used again while values are left."""
    form = form.replace("\\n", "\n").replace("\\t", "\t")
    left = list(values)

    def fill(hole: re.Match[str]) -> str:
        return "%" if hole[0] == "%%" else left.pop(0) if left else ""

    out = re.sub(r"%[sd%]", fill, form)
    while left and re.search(r"%[sd]", form):
        out += re.sub(r"%[sd%]", fill, form)
    return out
