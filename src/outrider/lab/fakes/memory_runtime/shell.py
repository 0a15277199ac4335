"""A very small shell over files in memory. It has only the commands that tests and scripted agents use.

The shell supports quotes, `$NAME`, `$?`, assignments, output redirections, `;`, `&&` and `||`. Other features of bash
(pipes, substitutions, loops) are syntax errors, so that no test passes only because the shell misread a command.
Invariant: an unsupported command results in an exit code and an error message, as in bash, never in an exception.
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.lab.fakes.memory_runtime.files import MemoryFiles, os_error

TOKEN = re.compile(
    r"""(?P<blank>[ \t]+)
    | (?P<connector>&&|\|\||;|\n)
    | (?P<redirect>[12]?>&[12]|[12]?>>?)
    | (?P<word>(?:'[^']*' | "(?:[^"\\`]|\\.)*" | \\. | [^\s;&|<>()`'"\\])+)""",
    re.VERBOSE | re.DOTALL,
)
PIECE = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|([^'"\\]+)""", re.DOTALL)
"""A part of a word: single-quoted, double-quoted, an escaped character, or plain."""
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*)|(\?))")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


class Output(NamedTuple):
    code: int = 0
    out: bytes = b""
    err: bytes = b""


class Simple(NamedTuple):
    """One command before expansion. `connector` is the operator before it: `;`, `&&` or `||`. `redirects` has pairs of
    an operator and its target. The target is "" for an operator without one, such as 2>&1."""

    connector: str
    words: list[str]
    redirects: list[tuple[str, str]]


class ShellExit(Exception):
    """Raised by the command `exit`. `code` is its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class MemoryShell:
    """The state of a shell: its variables, working directory and output. With `merged`, `out` and `err` are the same
    buffer. `ended` is True after the command `exit`."""

    def __init__(self, files: MemoryFiles, env: Mapping[str, str], cwd: str, *, merged: bool) -> None:
        self.files = files
        self.variables = dict(env)
        self.cwd = cwd
        self.out = bytearray()
        self.err = self.out if merged else bytearray()
        self.ended = False
        self._status = 0

    async def run(self, text: str, stdin: bytes = b"") -> int:
        """Run the commands in a text and return the exit code. Output is added to `out` and `err`."""
        try:
            for simple in parse(text):
                if (simple.connector == "&&" and self._status) or (simple.connector == "||" and not self._status):
                    continue
                words = list(simple.words)
                while words and ASSIGNMENT.match(words[0]):
                    name, _, value = words.pop(0).partition("=")
                    self.variables[name] = self._expand(value)
                # An unquoted word that expands to nothing is not an argument.
                argv = [value for word in words if (value := self._expand(word)) or re.search(r"['\"\\]", word)]
                try:
                    result = self._redirected(simple, await self._command(argv, stdin) if argv else Output())
                except OSError as error:
                    result = Output(1, err=f"bash: {error.filename}: {error.strerror}\n".encode())
                self._status = self._emit(result)
        except ValueError as error:
            self.err += f"bash: {error}\n".encode()
            self._status = 2
        except ShellExit as stop:
            self.ended = True
            self._status = stop.code
        return self._status

    async def run_argv(self, argv: Sequence[str], stdin: bytes = b"") -> int:
        """Run one command, given as a list of arguments, and return its exit code. Output is added to `out` and
        `err`."""
        try:
            self._status = self._emit(await self._command(list(argv), stdin))
        except ShellExit as stop:
            self._status = stop.code
        return self._status

    def _emit(self, result: Output) -> int:
        self.out += result.out
        self.err += result.err
        return result.code

    def _expand(self, word: str) -> str:
        known = {**self.variables, "?": str(self._status)}

        def value(text: str) -> str:
            return VARIABLE.sub(lambda found: known.get(found[1] or found[2] or found[3], ""), text)

        out = ""
        for single, double, escaped, plain in PIECE.findall(word):
            # The text in double quotes is split at escaped characters, so that "\$X" is not expanded.
            parts = re.split(r'\\(["\\$`])', double)
            out += single + "".join(part if at % 2 else value(part) for at, part in enumerate(parts))
            out += escaped + value(plain)
        return out

    def _redirected(self, simple: Simple, result: Output) -> Output:
        """Apply the redirections to standard output and standard error, from left to right."""
        places = ["1", "2"]
        for operator, word in simple.redirects:
            source = 1 if operator.startswith("2") else 0
            if not word:
                places[source] = places[int(operator[-1]) - 1]
                continue
            places[source] = path = self._path(self._expand(word))
            if path != "/dev/null":
                self.files.write(path, b"", append=operator.endswith(">>"))
        kept = {"1": b"", "2": b""}
        for place, data in zip(places, (result.out, result.err), strict=True):
            if place in kept:
                kept[place] += data
            elif place != "/dev/null":
                self.files.write(place, data, append=True)
        return Output(result.code, kept["1"], kept["2"])

    def _path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.cwd, name))

    async def _command(self, argv: list[str], stdin: bytes) -> Output:
        args = argv[1:]
        flags = "".join(arg for arg in args if arg.startswith("-"))
        names = [arg for arg in args if not arg.startswith("-")]
        try:
            match posixpath.basename(argv[0]):
                case "true" | ":":
                    return Output()
                case "false":
                    return Output(1)
                case "exit":
                    raise ShellExit(int(args[0]) & 0xFF if args else self._status)
                case "echo":
                    return Output(out=(" ".join(args) + "\n").encode())
                case "pwd":
                    return Output(out=f"{self.cwd}\n".encode())
                case "sleep":
                    await asyncio.sleep(float(args[0]))
                    return Output()
                case "export":
                    self.variables.update(dict(arg.split("=", 1) for arg in args if "=" in arg))
                    return Output()
                case "cd":
                    self.cwd = self._folder(args[0] if args else "/root")
                    return Output()
                case "test" | "[":
                    return self._test([arg for arg in args if arg != "]"])
                case "cat":
                    out, err = b"", ""
                    for name in args or ["-"]:
                        try:
                            out += stdin if name == "-" else self.files.read(self._path(name))
                        except OSError as error:  # like the real `cat`, go on with the next file
                            err += f"cat: {name}: {error.strerror}\n"
                    return Output(int(bool(err)), out, err.encode())
                case "mkdir":
                    for name in names:
                        path = self._path(name)
                        if "p" not in flags and (self.files.is_folder(path) or self.files.is_file(path)):
                            return Output(1, err=f"mkdir: cannot create directory '{name}': File exists\n".encode())
                        self.files.make_folder(path)
                    return Output()
                case "ls":
                    folder = self._folder(names[0] if names else ".")
                    inside = [posixpath.relpath(path, folder) for path in self.files.below(folder)]
                    return Output(out="".join(f"{name}\n" for name in inside if "/" not in name).encode())
                case "rm":
                    for name in names:
                        path = self._path(name)
                        if self.files.is_folder(path) and "r" not in flags:
                            return Output(1, err=f"rm: cannot remove '{name}': Is a directory\n".encode())
                        if not self.files.is_folder(path) and not self.files.is_file(path) and "f" not in flags:
                            return Output(1, err=f"rm: cannot remove '{name}': No such file or directory\n".encode())
                        self.files.remove(path)
                    return Output()
                case "bash" | "sh":
                    inner = MemoryShell(self.files, self.variables, self.cwd, merged=False)
                    code = await inner.run(args[1] if args[:1] == ["-c"] else stdin.decode(), stdin)
                    return Output(code, bytes(inner.out), bytes(inner.err))
        except OSError as error:
            return Output(1, err=f"{argv[0]}: {error.filename}: {error.strerror}\n".encode())
        except (ValueError, IndexError):
            return Output(2, err=f"{argv[0]}: bad arguments\n".encode())
        return Output(127, err=f"bash: {argv[0]}: command not found\n".encode())

    def _folder(self, name: str) -> str:
        """Return the path of a folder. Raises OSError if the path does not exist or is not a folder."""
        path = self._path(name)
        if not self.files.is_folder(path):
            self.files.read(path)
            raise os_error(errno.ENOTDIR, path)
        return path

    def _test(self, words: list[str]) -> Output:
        match words:
            case ["!", *rest]:
                return Output(int(not self._test(rest).code))
            case ["-f", name]:
                holds = self.files.is_file(self._path(name))
            case ["-d", name]:
                holds = self.files.is_folder(self._path(name))
            case ["-e", name]:
                holds = self.files.is_file(self._path(name)) or self.files.is_folder(self._path(name))
            case [left, "=", right]:
                holds = left == right
            case [left, "!=", right]:
                holds = left != right
            case _:
                return Output(2, err=f"bash: test: not known here: {' '.join(words)}\n".encode())
        return Output(int(not holds))


def parse(text: str) -> list[Simple]:
    """Parse a text into commands. Raises ValueError with bash's error message."""
    found: list[Simple] = []
    current = Simple(";", [], [])
    operator = ""
    """The redirection operator whose target is the next word."""
    text += "\n;"  # completes the last command
    at = 0
    while at < len(text):
        token = TOKEN.match(text, at)
        if token is None and text[at] in "'\"":
            raise ValueError(f"unexpected EOF while looking for matching `{text[at]}'")
        if token is None:
            raise ValueError(f"syntax error near unexpected token `{text[at]}'")
        kind, value, at = token.lastgroup, token[0], token.end()
        if kind == "word":
            if operator:
                current.redirects.append((operator, value))
            else:
                current.words.append(value)
            operator = ""
        elif kind == "redirect" and not operator:
            operator = "" if "&" in value else value
            if not operator:
                current.redirects.append((value, ""))
        elif kind in ("connector", "redirect"):
            if operator:
                raise ValueError("syntax error near unexpected token `newline'")
            if current.words or current.redirects:
                found.append(current)
            elif value in ("&&", "||") or current.connector != ";":
                raise ValueError(f"syntax error near unexpected token `{value}'")
            current = Simple(";" if value == "\n" else value, [], [])
    return found
