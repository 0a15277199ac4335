"""Joins the modules of the tool server into one program, and compiles it to bytecode, so that the program starts fast.

The modules of runtimes/guest share one namespace, so their top-level names must differ. Compiling takes longer than
starting the interpreter, so the bytecode for each interpreter is compiled once and kept. A server reads the bytecode
from its connection, so the sandbox needs no file of Outrider. Invariant: the program needs only the standard library of
Python 3.8 or newer.
"""

from __future__ import annotations

import ast
import functools
import importlib.resources
import marshal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from outrider.errors import RuntimeUnavailable
from outrider.sandbox.pythons.portable import portable_command, portable_python

# The boot program uses only `posix` and `marshal`, which are built into the interpreter. It does not use `sys.stdin`:
# this would load codecs, and would also read bytes that follow the program.
BOOT = (
    "import marshal,posix\n"
    "def take(n):\n"
    " b=b''\n"
    " while len(b)<n:\n"
    "  c=posix.read(0,n-len(b))\n"
    "  if not c: posix._exit(1)\n"
    "  b+=c\n"
    " return b\n"
    "scope={'__name__':'outrider_toolserver'}\n"
    "exec(marshal.loads(take(int.from_bytes(take(4),'big'))),scope)\n"
    "scope['main']()\n"
)
TEXT_BOOT = BOOT.replace("marshal.loads(", "compile(").replace("'big')))", "'big')),'toolserver','exec',0,True,2)")
PIPES_BOOT = TEXT_BOOT.replace("main", "main_on_pipes")
"""A boot program that reads the tool server as source text instead of bytecode, and uses two pipes instead of a
socket."""
COMPILE = (
    "import sys,marshal\n"
    "if sys.version_info<(3,8): sys.exit('Python %d.%d is older than 3.8'%sys.version_info[:2])\n"
    "code=compile(sys.stdin.buffer.read(),'toolserver','exec',0,True,2)\n"
    "sys.stdout.buffer.write(marshal.dumps(code))\n"
)
FLAGS = ("-I", "-S")
"""Flags that make the interpreter ignore environment variables, the user's modules and site-packages, because an image
may put anything there."""

GUEST = "outrider.sandbox.runtimes.guest"
MODULES = (
    "msgpack",
    "filesystem.paths",
    "processes",
    "poll_loop",
    "connection",
    "command",
    "child_reply",
    "shells.shell",
    "bridge",
    "tunnel",
    "filesystem.trees",
    "filesystem.tree_writer",
    "filesystem.files",
    "filesystem.glob",
    "filesystem.restore",
    "memory_watch",
    "netlink_watch",
    "process_watch",
    "server",
)
"""The tool server's modules. Each comes after the modules that it imports."""

COMPILING = threading.Lock()
"""This lock is held while code is compiled. If sandboxes start together, the first one compiles, and the others wait
for the cached result. The lock also prevents concurrent calls of `ast.parse`, which fail in Python 3.11."""


def source(name: str) -> str:
    """Return the text of a module of runtimes/guest, named relative to that package, such as `filesystem.trees`."""
    folder = importlib.resources.files(GUEST)
    return folder.joinpath(name.replace(".", "/") + ".py").read_text(encoding="utf-8")


@functools.cache
def shell_program(kind: Literal["python", "ipython"]) -> str:
    """Return the source text that `python3 -c` runs as a live Python or IPython shell."""
    modules = ("shells.python_program", "shells.ipython_program") if kind == "ipython" else ("shells.python_program",)
    engine = "RichEngine" if kind == "ipython" else "PlainEngine"
    with COMPILING:
        return f"{program(modules)}\nserve({engine})\n"


def program(modules: Sequence[str] = MODULES) -> str:
    """Return the source text of `modules`, joined into one program. Type annotations are left out, and so are the
    modules' imports of each other."""
    tree = ast.Module(body=[], type_ignores=[])
    for name in modules:
        for node in ast.parse(source(name)).body:
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                tree.body += node.orelse
            elif not (
                isinstance(node, ast.ImportFrom) and (node.module or "").startswith((GUEST, "__future__", "typing"))
            ):
                tree.body.append(node)
    return ast.unparse(_WithoutAnnotations().visit(tree))


class _WithoutAnnotations(ast.NodeTransformer):
    """Removes annotations from the program, because the program does not use them, and loading them would slow every
    start."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([node.target], node.value), node))


LOADER = """
import marshal, sys
def main():
    for name in ("outrider", "outrider.sandbox", "outrider.sandbox.runtimes", *FOLDERS, "typing"):
        sys.modules[name] = type(sys)(name)
    sys.modules["typing"].TYPE_CHECKING = False  # the modules use nothing else of `typing`, which is slow to load
    for name, code in PARTS:
        module = sys.modules[name] = type(sys)(name)
        exec(marshal.loads(code), module.__dict__)
        folder, _, own = name.rpartition(".")
        setattr(sys.modules[folder], own, module)
    del sys.modules["typing"]
    module.enter(sys.argv[1:])
    scope = {"__name__": "outrider_toolserver"}
    exec(marshal.loads(SERVER), scope)
    scope["main"]()
"""


@functools.lru_cache(maxsize=8)  # cached, because our own files do not change
def confined(modules: Sequence[str], server: bytes) -> bytes:
    """Return bytecode that confines the process, and then runs the tool server's bytecode `server`.

    `modules` are modules of runtimes/guest. Each must come after the modules that it imports. `enter` of the last
    module is called with the command-line arguments that follow `server_command`. The bytecode works only in an
    interpreter with the same Python version as this one.
    """
    parts = tuple((f"{GUEST}.{name}", _bytecode(name, source(name))) for name in modules)
    folders = tuple(dict.fromkeys([GUEST, *(name.rpartition(".")[0] for name, _ in parts)]))
    return _bytecode("loader", f"FOLDERS = {folders!r}\nPARTS = {parts!r}\nSERVER = {server!r}\n{LOADER}")


def _bytecode(name: str, text: str) -> bytes:
    return marshal.dumps(compile(text, name, "exec", dont_inherit=True, optimize=2))


def server_command(interpreter: str) -> list[str]:
    """Return the command that starts the tool server. The server's standard input must begin with
    `delivery(bytecode)`."""
    return [interpreter, *FLAGS, "-c", BOOT]


def remote_command() -> list[str]:
    """Return the command that starts the tool server with the Python of another machine. The server's standard input
    and output may be pipes. The input must begin with `remote_delivery()`."""
    return ["python3", *FLAGS, "-c", PIPES_BOOT]


@functools.cache
def remote_delivery() -> bytes:
    """Return the tool server's source text, ready to be sent. Every Python from 3.8 on can run it. Bytecode would run
    only in the Python version that compiled it."""
    with COMPILING:
        return delivery(program().encode())


def delivery(bytecode: bytes) -> bytes:
    return len(bytecode).to_bytes(4, "big") + bytecode


def compiled(python: tuple[str, ...]) -> bytes:
    """Return the tool server's bytecode, compiled by a Python interpreter of this machine. `python` is the command that
    starts the interpreter.

    Raises RuntimeUnavailable if the command does not start Python 3.8 or newer. The first call blocks for about 50 ms.
    A call also blocks while another thread compiles.
    """
    with COMPILING:
        return _compiled(python)


@functools.lru_cache(maxsize=8)  # can be cached, because no interpreter changes while the service runs
def _compiled(python: tuple[str, ...]) -> bytes:
    command = [*python, *FLAGS, "-c", COMPILE]
    try:
        done = subprocess.run(command, input=program().encode(), capture_output=True, env={}, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeUnavailable(f"cannot run {python[-1]}: {error}") from error
    if done.returncode != 0:
        raise RuntimeUnavailable(
            f"{python[-1]} is no usable Python",
            hint="the tool server needs Python 3.8 or newer",
            log_tail=done.stderr.decode(errors="replace")[-2000:],
        )
    return done.stdout


def portable_server() -> tuple[Path, bytes]:
    """Return the folder of the portable interpreter, and the tool server's bytecode for this interpreter. The call
    blocks. Raises RuntimeUnavailable."""
    folder = portable_python()
    return folder, compiled(tuple(portable_command(str(folder))))
