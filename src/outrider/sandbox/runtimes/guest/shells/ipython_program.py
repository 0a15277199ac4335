"""The program of a live IPython shell. It runs inputs as a notebook does, but without Jupyter and its messages.

This source is appended to the source of python_program.py, and both run as one program. Output is plain text without
colours. Pictures, HTML and JSON are returned separately as displays. The program writes nothing to the home folder and
keeps no history. Invariant: all displays of one input together have at most DISPLAY_MAX bytes. A short note replaces a
value that would exceed this limit.
"""

import binascii
import json
import os
import re
import sys
import warnings
from typing import Any

from outrider.sandbox.runtimes.guest.shells.python_program import InputResults, flush, left_with

try:
    from IPython.core import interactiveshell
    from IPython.core.autocall import ExitAutocall, IPyAutocall
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.macro import Macro
    from traitlets.config import Config
except ImportError as error:
    sys.exit(f"IPython cannot be imported: {error}")

DISPLAY_MAX = 8 << 20
"""Maximum bytes of all displays of one input together. The displays are part of the input's result, and the tool server
accepts only results of up to 10 MiB (see FRAME_MAX in shell.py)."""
DISPLAYS_MAX = 1000
FORMATS_MAX = 60
MIME_MAX = 100
"""Three maximums: the displays per input, the formats per display, and the characters in a MIME type. Displays, formats
and values beyond a maximum are left out. The maximums are small, because the host decodes all displays of an input at
once."""
BINARY = ("image/png", "image/jpeg", "image/gif", "image/webp", "application/pdf")
BACKEND = "module://matplotlib_inline.backend_inline"
SPECIAL = re.compile(r"[%!?]|^\s*(?:[,;/]|>>>|\.\.\.|In ?\[)|\A\s", re.MULTILINE)
"""Matches code that may use IPython's own syntax. All other code is plain Python, except for some inputs of one line,
such as a magic command without `%` (see `may_be_special`)."""
WORD = re.compile(r"\w+")
PLAIN_TYPES = (int, float, complex, bool, str, bytes)


def plain_data(mime: str, value: Any) -> Any:
    """Convert a value of a display to str or bytes. The base64 text of a picture or PDF becomes bytes, and JSON becomes
    str."""
    if mime in BINARY and isinstance(value, str):
        try:
            return binascii.a2b_base64(value)
        except ValueError:
            return value
    if isinstance(value, (str, bytes)):
        return value
    return json.dumps(value, default=repr)


class Gallery:
    """Collects the displays of one input, within the limits above."""

    def __init__(self, session: InputResults) -> None:
        self.session = session
        self.size = 0

    def clear(self) -> None:
        self.size = 0
        self.session.displays = []

    def add(self, data: dict[str, Any]) -> None:
        """Add a display. A display of plain text only is not added, because the program prints it."""
        if set(data) <= {"text/plain"}:
            return
        kept: dict[str, Any] = {}
        for mime, value in list(data.items())[:FORMATS_MAX]:
            value = plain_data(mime, value)
            size = len(value if isinstance(value, bytes) else value.encode("utf-8", "replace"))
            if len(mime) > MIME_MAX or self.size + size > DISPLAY_MAX:
                kept.setdefault("text/plain", f"[{mime[:MIME_MAX]} of {size} bytes left out]")
            else:
                self.size += size + len(mime)
                kept[mime] = value
        if len(self.session.displays) < DISPLAYS_MAX:
            self.session.displays.append(kept)


class EchoHook(DisplayHook):  # type: ignore[misc]  # IPython is not typed in full
    """Prints the value of an input's last expression, without IPython's `Out[n]:`. The last three values are kept as
    `_`, `__` and `___`. IPython's own hook keeps every value in `Out`, so a long session would need more and more
    memory."""

    kept: tuple[Any, ...] = ("", "", "")

    def record_plain_printers(self) -> None:
        """Record IPython's printers for simple types, to detect later whether an input has replaced one of them."""
        formatter = self.shell.display_formatter
        text = formatter.formatters["text/plain"].type_printers
        self.text_printers = text
        self.plain = {one: text.get(one) for one in PLAIN_TYPES}
        self.rich_printers = [
            one.type_printers for one in (*formatter.formatters.values(), formatter.mimebundle_formatter)
        ]
        self.rich_printers = [one for one in self.rich_printers if one is not text]

    def compute_format_data(self, result: object) -> tuple[Any, Any]:
        """Format a value. A simple value, such as a number, needs only its text, so IPython's dozen other formatters
        are skipped."""
        kind = type(result)
        if (
            kind in self.plain
            and self.text_printers.get(kind) is self.plain[kind]
            and not any(kind in printers for printers in self.rich_printers)
        ):
            return {"text/plain": repr(result)}, {}
        return super().compute_format_data(result)  # type: ignore[no-any-return]  # IPython is not typed in full

    def update_user_ns(self, result: object) -> None:
        """Assign the last three results to `_`, `__` and `___`, unless the user has assigned one of these names."""
        names = self.shell.user_ns
        if all(names.get("_" * length, "") is self.kept[length - 1] for length in (1, 2, 3)):
            self.kept = (result, *self.kept[:2])
            names["_"], names["__"], names["___"] = self.kept

    def quiet(self) -> bool:
        source = self.shell.source.rstrip()
        return ";" in source.rpartition("\n")[2] and self.semicolon_at_end_of_expression(source)

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict[str, Any], md_dict: object = None) -> None:
        self.shell.gallery.add(format_dict)
        if "text/plain" in format_dict:
            self.shell.session.show(format_dict["text/plain"] + "\n")

    def log_output(self, format_dict: object) -> None:
        pass

    def finish_displayhook(self) -> None:
        self._is_active = False


class DisplayKeeper(DisplayPublisher):  # type: ignore[misc]  # IPython is not typed in full
    """Receives the displays of an input. Prints plain text, and passes displays with other formats to the gallery."""

    def publish(self, data: dict[str, Any], metadata: object = None, **options: object) -> None:
        self.shell.gallery.add(data)
        if "text/plain" in data:
            sys.stdout.write(data["text/plain"] + "\n")

    def clear_output(self, wait: bool = False) -> None:
        self.shell.gallery.clear()


class Leave(ExitAutocall):  # type: ignore[misc]  # IPython is not typed in full
    """IPython's command `exit`. It ends the running input, but the shell goes on, as in the live Python shell."""

    def __call__(self, code: object = None) -> None:
        raise SystemExit(code)


class NoProfile:
    """Stands for IPython's profile folder, which does not exist here."""

    location = ""


class NotebookShell(InteractiveShell):  # type: ignore[misc]  # IPython is not typed in full
    """An IPython shell that writes no files to the home folder. IPython itself creates the only instance, so `session`
    and `gallery` are attributes of the class."""

    session: InputResults
    gallery: Gallery
    source = ""
    profile_dir = NoProfile()
    kept: dict[str, Any] = {}  # noqa: RUF012  # there is one shell in the process

    def init_ipython_dir(self, ipython_dir: object) -> None:
        """Do nothing. IPython's own method would create a folder in the home folder."""

    def init_profile_dir(self, profile_dir: object) -> None:
        """Do nothing, for the same reason as `init_ipython_dir`."""

    def init_virtualenv(self) -> None:
        pass

    @property
    def db(self) -> dict[str, Any]:
        """Storage for magic commands. The storage is in memory, because IPython's own storage is a file in the home
        folder."""
        return self.kept

    @db.setter
    def db(self, value: object) -> None:
        pass

    def _exiter_default(self) -> Leave:
        return Leave(self)

    def system(self, cmd: str) -> None:
        flush()
        self.system_raw(cmd)

    def showtraceback(self, exc_tuple: object = None, *args: object, **options: object) -> None:
        """Print an exception. Interrupts are ignored until the next input. Printing takes longer than the pause between
        two interrupts, so the next interrupt would otherwise cut off the output."""
        self.session.interruptible = False
        error = sys.exc_info()[1]
        if exc_tuple is None and isinstance(error, SystemExit):
            return
        super().showtraceback(exc_tuple, *args, **options)


class RichEngine:
    """Runs inputs in the same steps as IPython. Steps that would change nothing are skipped, because they take most of
    the time of a short input."""

    def __init__(self, session: InputResults) -> None:
        os.environ.setdefault("MPLBACKEND", BACKEND)
        warnings.filterwarnings("ignore", message="To exit: use 'exit'")
        NotebookShell.session = session
        NotebookShell.gallery = self.gallery = Gallery(session)
        self.session = session
        self.shell = NotebookShell.instance(
            config=settings(), display_pub_class=DisplayKeeper, displayhook_class=EchoHook
        )
        self.shell.displayhook.record_plain_printers()
        self.shell.builtin_trap.__enter__()  # never exited, because threads of an input may run on after the input
        self.shell.display_trap.__enter__()
        self.transformers = self.count_transformers()

    def run(self, source: str, number: int) -> int:
        """Run one input. Returns a status, as `PlainEngine.run` does."""
        self.gallery.clear()
        self.session.interruptible = True
        self.shell.source = source
        error = self.execute(source if source.endswith("\n") else source + "\n")
        return left_with(error) if isinstance(error, SystemExit) else int(error is not None)

    def execute(self, source: str) -> object:
        """Run an input as `InteractiveShell.run_cell` does, but without a history. Returns the exception that ended the
        input, if any."""
        shell = self.shell
        cell, failed = source, None
        if self.may_be_special(source):
            try:
                cell = shell.transform_cell(source)
            except Exception:  # raised by the input, and printed below
                failed = sys.exc_info()
        given = {"transformed_cell": cell, "preprocessing_exc_tuple": failed}
        work = shell.run_cell_async(source, **given)
        waits = ("await" in cell or "async" in cell) and shell.should_run_async(source, **given)
        result: Any = None
        try:
            result = shell.loop_runner(work) if waits else finished(work)
            return result.error_before_exec or result.error_in_exec
        except BaseException as error:  # raised by the input, and printed
            work.close()
            shell.showtraceback()
            return error
        finally:
            shell.events.trigger("post_execute")
            shell.events.trigger("post_run_cell", result)

    def may_be_special(self, source: str) -> bool:
        """Return whether IPython may change the code before running it."""
        if SPECIAL.search(source) or self.count_transformers() != self.transformers:
            return True
        word = WORD.match(source)
        if word is None or "\n" in source.rstrip("\n"):
            return False
        known = self.shell.user_ns.get(word.group())
        return (
            bool(self.shell.autocall)
            or self.shell.find_line_magic(word.group()) is not None
            or isinstance(known, (IPyAutocall, Macro))
        )

    def count_transformers(self) -> int:
        """Count IPython's input transformers. If an extension has added one, every input must pass through them."""
        manager = self.shell.input_transformer_manager
        lists = (manager.cleanup_transforms, manager.line_transforms, manager.token_transformers)
        return sum(map(len, lists)) + len(self.shell.input_transformers_post)


def finished(work: object) -> object:
    """Run a coroutine that never waits, without an event loop. Returns its result."""
    try:
        work.send(None)  # type: ignore[attr-defined]  # `work` is a coroutine
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("the input waited for something outside a loop")


def settings() -> object:
    from IPython import version_info

    if hasattr(interactiveshell, "PickleShareDB"):  # in IPython before 9, this would create a folder
        interactiveshell.PickleShareDB = lambda path: {}
    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = "nocolor" if version_info[0] >= 9 else "NoColor"
    config.InteractiveShell.history_length = 0
    config.InteractiveShell.logappend = config.InteractiveShell.logfile = ""
    config.InteractiveShell.banner1 = ""
    config.Completer.use_jedi = False
    return config
