"""Unified diffs: parsed, applied to the contents of files, and put in place.

The module supports git's diffs (new, deleted, renamed and copied files, modes, symbolic links, quoted names, a missing
last newline) and plain `diff -u`, but no binary patches and no submodules. As with `git apply`, lines must match byte
for byte. A hunk may have moved, but a hunk at a file's beginning or end must still be there. `plan_patch` is pure. Only
`patched_files` and its callees touch files. Invariant: a diff is applied completely, or not at all with the reason in a
PatchRefused or an OSError.
"""

from __future__ import annotations

import posix
from typing import TYPE_CHECKING

from outrider.sandbox.runtimes.guest.filesystem.files import write_all
from outrider.sandbox.runtimes.guest.filesystem.paths import exists, folder_of, is_link, make_folders

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN_MODE = 0o100644
LINK_MODE = 0o120000
PATCH_MODES = (0o100644, 0o100755, LINK_MODE)
OLD_PREFIXES = ("a/", "i/", "w/", "c/", "o/", "1/")
NEW_PREFIXES = ("b/", "w/", "i/", "c/", "o/", "2/")
"""Git's prefixes of names: a/ and b/, others with `diff.mnemonicPrefix`, 1/ and 2/ with --no-index."""
ESCAPES = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13}
LINE_SHOWN = 80
"""Maximum number of bytes of a line quoted in an error."""


class PatchRefused(Exception):
    """The reason why a patch cannot be applied, with the file and the hunk."""


class PatchEntry:
    """A file or symbolic link: its mode in git's form, and its content or target."""

    def __init__(self, mode: int, data: bytes) -> None:
        self.mode = mode
        self.data = data


class Hunk:
    """`old` and `new` are the hunk's lines before and after, with their ends. `leading` and `trailing` are the numbers
    of context lines at its beginning and end."""

    def __init__(self, old_start: int, new_start: int) -> None:
        self.old_start = old_start
        self.new_start = new_start
        self.old: list[bytes] = []
        self.new: list[bytes] = []
        self.leading = 0
        self.trailing = 0


class FilePatch:
    """The changes of one file in a diff. `old` is None for a created file, `new` is None for a deleted file.

    `maybe_created` is True if the only hunk has no old lines. The file may then be new, because plain `diff -u` does
    not mark new files.
    """

    def __init__(self) -> None:
        self.old: str | None = None
        self.new: str | None = None
        self.mode = 0
        self.created = False
        self.maybe_created = False
        self.copied = False
        self.hunks: list[Hunk] = []


def plan_patch(text: bytes, look: Callable[[str], PatchEntry | None]) -> dict[str, PatchEntry | None]:
    """Return the new entry of each path, None for a file to be deleted. `look` returns the current entry. Raises
    PatchRefused."""
    patches = read_patch(text)
    if not patches:
        raise PatchRefused("no change of a file in the patch: it needs lines that begin with ---, +++ and @@")
    return Planner(patches, look).after


class Planner:
    """Applies the patches of a diff, one file after another. `after` is the result.

    The source of a rename or copy is the file as it was before the whole diff, because renames may go round in a
    circle.
    """

    def __init__(self, patches: list[FilePatch], look: Callable[[str], PatchEntry | None]) -> None:
        self.look = look
        self.after: dict[str, PatchEntry | None] = {}
        self.leaving = {one.old for one in patches if one.old != one.new and not one.copied}
        for one in patches:
            self.apply(one)

    def now(self, path: str) -> PatchEntry | None:
        return self.after[path] if path in self.after else self.look(path)

    def apply(self, one: FilePatch) -> None:
        moved = one.old is not None and one.new is not None and one.old != one.new
        before = None if one.old is None else self.look(one.old) if moved else self.now(one.old)
        created = one.created or (one.maybe_created and before is None)
        if before is None and not created:
            raise PatchRefused(f"{one.old}: there is no such file")
        if one.new is not None and (created or moved) and self.taken(one.new):
            raise PatchRefused(f"{one.new}: there is such a file already")
        data = patched(one.new or one.old or "", before.data if before else b"", one.hunks)
        if one.new is None and data:
            raise PatchRefused(f"{one.old}: the patch deletes the file, but not all that is in it")
        if one.old is not None and one.old != one.new and not one.copied and self.after.get(one.old) is None:
            self.after[one.old] = None
        if one.new is not None:
            self.after[one.new] = PatchEntry(one.mode or (before.mode if before else PLAIN_MODE), data)

    def taken(self, path: str) -> bool:
        """Return whether the path has a file that an earlier part of the diff has written, or that no part of the diff
        moves away or deletes."""
        return self.now(path) is not None and (path in self.after or path not in self.leaving)


def lines_of(data: bytes) -> list[bytes]:
    """Return the lines with their ends. Only a newline ends a line: `splitlines` splits at more characters than git."""
    lines = data.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def patched(name: str, data: bytes, hunks: list[Hunk]) -> bytes:
    """Return the content of a file after its hunks. Raises PatchRefused."""
    lines = lines_of(data)
    fresh = [False] * len(lines)
    """True for each line that an earlier hunk has put there: as with git, no later hunk matches such a line."""
    for number, hunk in enumerate(hunks, 1):
        at = hunk_place(hunk, lines, fresh)
        if at < 0:
            raise PatchRefused(
                f"{name}: hunk {number} (@@ -{hunk.old_start} +{hunk.new_start} @@) does not apply: "
                + why_not_there(hunk, lines)
            )
        lines[at : at + len(hunk.old)] = hunk.new
        fresh[at : at + len(hunk.old)] = [True] * len(hunk.new)
    return b"".join(lines)


def hunk_place(hunk: Hunk, lines: list[bytes], fresh: list[bool]) -> int:
    """Return the index at which the hunk's lines match, nearest to the hunk's stated position; -1 for no match."""
    size = len(hunk.old)
    last = len(lines) - size
    expected = max(0, hunk.new_start - 1)
    at_start, at_end = hunk.old_start <= 1, not hunk.trailing
    # A hunk without context could match anywhere, so it is not searched for.
    bare = not at_start and not hunk.leading and not hunk.trailing

    def fits(at: int) -> bool:
        if not 0 <= at <= last or (at_start and at) or (at_end and at != last and not bare):
            return False
        return lines[at : at + size] == hunk.old and not any(fresh[at : at + size])

    if bare:
        at = expected if hunk.new else hunk.new_start
        return at if fits(at) else -1
    if at_start or at_end:
        at = 0 if at_start else last
        return at if fits(at) else -1
    for distance in range(len(lines) + 1):
        for at in (expected - distance, expected + distance) if distance else (expected,):
            if fits(at):
                return at
    return -1


def why_not_there(hunk: Hunk, lines: list[bytes]) -> str:
    """Describe the first difference at the hunk's stated position."""
    at = 0 if hunk.old_start <= 1 else max(0, hunk.new_start - 1)
    for offset, wanted in enumerate(hunk.old):
        if at + offset >= len(lines):
            return f"the file ends before line {at + offset + 1}, where the patch has {shown_line(wanted)}"
        if lines[at + offset] != wanted:
            there = shown_line(lines[at + offset])
            return f"line {at + offset + 1} is {there}, where the patch has {shown_line(wanted)}"
    if not hunk.trailing and at + len(hunk.old) < len(lines):
        return "the file goes on where the patch has its end"
    return "its lines are not where it must be"


def shown_line(line: bytes) -> str:
    text = line[:LINE_SHOWN].decode("utf-8", "backslashreplace")
    return repr(text) + ("..." if len(line) > LINE_SHOWN else "")


def read_patch(text: bytes) -> list[FilePatch]:
    """Return the files of a diff, in its order. Text between files is skipped, because diffs in mails and logs have
    such text. Raises PatchRefused."""
    reader = PatchReader(lines_of(text if text.endswith(b"\n") else text + b"\n"))
    found = []
    while reader.at < len(reader.lines):
        if reader.here(b"diff --git "):
            found.append(reader.git_file())
        elif reader.here(b"--- ") and reader.here(b"+++ ", 1) and reader.here(b"@@ -", 2):
            one = FilePatch()
            reader.names(one)
            reader.hunks(one)
            found.append(one)
        elif reader.here(b"@@ -") and hunk_header(reader.lines[reader.at]):
            raise PatchRefused(
                f"line {reader.at + 1} of the patch: a hunk without lines --- and +++ that name its file"
            )
        else:
            reader.at += 1
    return found


class PatchReader:
    """The lines of a diff, and the index of the next line to read."""

    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines
        self.at = 0

    def here(self, start: bytes, ahead: int = 0) -> bool:
        return self.at + ahead < len(self.lines) and self.lines[self.at + ahead].startswith(start)

    def broken(self, what: str) -> PatchRefused:
        return PatchRefused(f"line {self.at + 1} of the patch: {what}")

    def git_file(self) -> FilePatch:
        one = FilePatch()
        one.old, one.new = names_of_header(self.lines[self.at][11:].rstrip(b"\r\n"))
        deleted = False
        self.at += 1
        while self.at < len(self.lines):
            word, _, value = self.lines[self.at].rstrip(b"\r\n").partition(b" ")
            rest = value.rpartition(b" ")[2]
            if word in (b"old", b"new", b"deleted") and b"mode " in value:
                one.mode = 0 if word == b"old" else self.mode(rest)
                one.created = one.created or (word == b"new" and value.startswith(b"file"))
                deleted = deleted or word == b"deleted"
            elif word in (b"rename", b"copy") and value.startswith((b"from ", b"to ")):
                side, _, name = value.partition(b" ")
                one.copied = word == b"copy"
                setattr(one, "old" if side == b"from" else "new", safe_name(plain_name(name)))
            elif word == b"---" and self.here(b"+++ ", 1):
                self.names(one)
                break
            elif word in (b"GIT", b"Binary"):
                raise self.broken(f"{one.new or one.old}: a binary patch cannot be applied; write the file instead")
            elif word not in (b"index", b"similarity", b"dissimilarity"):
                break
            self.at += 1
        one.old = None if one.created else one.old
        one.new = None if deleted else one.new
        if one.old is None and one.new is None:
            raise self.broken("the names of the file cannot be read")
        self.hunks(one)
        return one

    def mode(self, digits: bytes) -> int:
        try:
            mode = int(digits, 8)
        except ValueError:
            mode = 0
        if mode not in PATCH_MODES:
            raise self.broken(f"the mode {digits.decode('ascii', 'replace')} is none of a file or symbolic link")
        return mode

    def names(self, one: FilePatch) -> None:
        """Read the lines --- and +++."""
        old, new = (plain_name(self.lines[self.at + ahead][4:].rstrip(b"\r\n")) for ahead in (0, 1))
        one.created = one.created or old == "/dev/null"
        sides = stripped_names(None if old == "/dev/null" else old, None if new == "/dev/null" else new)
        if one.old is None or one.old == one.new:
            one.old, one.new = sides
        one.maybe_created = True
        self.at += 2

    def hunks(self, one: FilePatch) -> None:
        while self.here(b"@@ -"):
            header = hunk_header(self.lines[self.at])
            if header is None:
                raise self.broken(
                    f"{one.new or one.old}: this is no header of a hunk: {shown_line(self.lines[self.at])}"
                )
            self.at += 1
            one.hunks.append(self.hunk(one, len(one.hunks) + 1, *header))
        one.maybe_created = one.maybe_created and len(one.hunks) == 1 and not one.hunks[0].old

    def hunk(self, one: FilePatch, number: int, old_start: int, olds: int, new_start: int, news: int) -> Hunk:
        hunk = Hunk(old_start, new_start)
        changed = False
        while len(hunk.old) < olds or len(hunk.new) < news or self.here(b"\\"):
            line = self.lines[self.at] if self.at < len(self.lines) else b""
            # Editors and mail programs strip the blank of an empty context line.
            sign, rest = (b" ", line) if line == b"\n" else (line[:1], line[1:])
            if sign == b"\\" and (hunk.old or hunk.new):
                self.cut_newline(hunk)
            elif sign in (b" ", b"-", b"+") and sign:
                hunk.old += [rest] if sign != b"+" else []
                hunk.new += [rest] if sign != b"-" else []
                changed = changed or sign != b" "
                hunk.leading += not changed
                hunk.trailing = hunk.trailing + 1 if sign == b" " else 0
                self.last = sign
            else:
                raise self.broken(f"{one.new or one.old}: hunk {number} is cut short or its header counts wrong")
            self.at += 1
        if len(hunk.old) != olds or len(hunk.new) != news:
            raise self.broken(f"{one.new or one.old}: hunk {number} has other numbers of lines than its header says")
        return hunk

    def cut_newline(self, hunk: Hunk) -> None:
        """Apply a line "\\ No newline at end of file", which refers to the previous line."""
        for lines, other in ((hunk.old, b"+"), (hunk.new, b"-")):
            if self.last != other and lines[-1].endswith(b"\n"):
                lines[-1] = lines[-1][:-1]


def hunk_header(line: bytes) -> tuple[int, int, int, int] | None:
    """Return the first line and the number of lines, before the change and then after. Returns None if the line is not
    a hunk header."""
    words = line.split(b" ", 3)
    if len(words) < 4 or words[0] != b"@@" or words[1][:1] != b"-" or words[2][:1] != b"+" or words[3][:2] != b"@@":
        return None
    numbers = []
    for word in words[1:3]:
        start, comma, count = word[1:].partition(b",")
        if not start.isdigit() or (comma and not count.isdigit()):
            return None
        numbers += [int(start), int(count) if comma else 1]
    return numbers[0], numbers[1], numbers[2], numbers[3]


def plain_name(field: bytes) -> str:
    """Return the name in a field: a quoted name with backslashes, or the text up to a tab, after which `diff -u` puts a
    date."""
    if not field.startswith(b'"'):
        return field.partition(b"\t")[0].decode("utf-8", "surrogateescape")
    return unquoted(field)[0]


def unquoted(field: bytes) -> tuple[str, bytes]:
    """Return the quoted name at the beginning of a field, and the rest of the field."""
    out = bytearray()
    at = 1
    while at < len(field) and field[at : at + 1] != b'"':
        char, step = field[at], 1
        if field[at : at + 1] == b"\\":
            octal = field[at + 1 : at + 4]
            if len(octal) == 3 and octal.isdigit():
                char, step = int(octal, 8) & 0xFF, 4
            else:
                char, step = ESCAPES.get(octal[:1], (octal or b"\\")[0]), 2
        out.append(char)
        at += step
    return bytes(out).decode("utf-8", "surrogateescape"), field[at + 1 :]


def names_of_header(field: bytes) -> tuple[str | None, str | None]:
    """Return the names after `diff --git`, (None, None) if they cannot be separated.

    Names with blanks are not quoted, so a field without quotes is read only if both names are the same. For different
    names, git writes further lines with one name each.
    """
    if field.startswith(b'"'):
        old, rest = unquoted(field)
        return stripped_names(old, plain_name(rest.lstrip(b" ")))
    if field.endswith(b'"') and b' "' in field:
        first, _, second = field.partition(b' "')
        return stripped_names(plain_name(first), unquoted(b'"' + second)[0])
    half = len(field) // 2
    left, right = (side.decode("utf-8", "surrogateescape") for side in (field[:half], field[half + 1 :]))
    same = field[half : half + 1] == b" " and (left == right or left[2:] == right[2:])
    return stripped_names(left, right) if same else (None, None)


def stripped_names(old: str | None, new: str | None) -> tuple[str | None, str | None]:
    """Return the names without git's prefixes. Raises PatchRefused for a name that may lead out of the patch's
    folder."""
    if (old is None or old.startswith(OLD_PREFIXES)) and (new is None or new.startswith(NEW_PREFIXES)):
        old, new = old and old[2:], new and new[2:]
    return (old and safe_name(old), new and safe_name(new))


def safe_name(name: str) -> str:
    if not name or "\0" in name or {"", ".", ".."} & set(name.split("/")):
        raise PatchRefused(f"{name}: a patch may only name files below its folder")
    return name


def patched_files(folder: str, text: bytes, size: int) -> bytes:
    """Apply a patch below `folder`. Returns "+" and the paths with NULs between them, or "-" and the reason for a
    refusal. A file of more than `size` bytes is refused."""
    try:
        changes = plan_patch(text, lambda path: entry_at(folder, path, size))
        put_in_place(folder, changes)
    except PatchRefused as conflict:
        return b"-" + str(conflict).encode("utf-8", "backslashreplace")
    except OSError as error:
        where = str(error.filename or folder)
        return b"-" + (where + ": " + posix.strerror(error.errno or 0)).encode("utf-8", "backslashreplace")
    return b"+" + "\0".join(changes).encode("utf-8", "surrogateescape")


def entry_at(folder: str, path: str, size: int) -> PatchEntry | None:
    """Return the entry at a path, None if there is nothing. As with git, a link among the path's folders is not
    followed. Raises PatchRefused."""
    parts = path.split("/")
    for count in range(1, len(parts)):
        if is_link(folder + "/" + "/".join(parts[:count])):
            raise PatchRefused(
                f"{path}: {'/'.join(parts[:count])} is a symbolic link, which a patch does not go through"
            )
    place = folder + "/" + path
    try:
        status = posix.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return None
    kind = status.st_mode & 0o170000
    if kind == 0o120000:
        return PatchEntry(LINK_MODE, posix.readlink(place).encode("utf-8", "surrogateescape"))
    if kind != 0o100000:
        raise PatchRefused(f"{path}: not a regular file")
    if status.st_size > size:
        raise PatchRefused(f"{path}: larger than {size} bytes")
    with open(place, "rb") as file:
        return PatchEntry(0o100755 if status.st_mode & 0o100 else 0o100644, file.read())


def put_in_place(folder: str, changes: dict[str, PatchEntry | None]) -> None:
    """Write the new contents beside the old files, move the old files aside, move the new ones in, and only then delete
    the old ones. All steps that can fail for lack of space come first, and each step before the deletion can be undone.
    Raises OSError."""
    token = posix.urandom(4).hex()
    renames: list[tuple[str, str]] = []
    fresh: list[str] = []
    made_folders: list[str] = []
    try:
        for number, (path, entry) in enumerate(changes.items()):
            if entry is not None:
                made_folders += missing_folders(folder, path)
                make_folders(folder_of(folder + "/" + path))
                fresh.append(temporary_name(folder, path, "new", token, number))
                write_entry(fresh[-1], entry, folder + "/" + path)
        for number, path in enumerate(changes):
            if exists(folder + "/" + path):
                move(folder + "/" + path, temporary_name(folder, path, "old", token, number), renames)
        for number, (path, entry) in enumerate(changes.items()):
            if entry is not None:
                move(temporary_name(folder, path, "new", token, number), folder + "/" + path, renames)
    except OSError:
        for source, target in reversed(renames):
            posix.rename(target, source)
        for path in fresh:
            if exists(path):
                posix.unlink(path)
        for path in made_folders:
            if exists(path):
                posix.rmdir(path)
        raise
    for number, (path, entry) in enumerate(changes.items()):
        aside = temporary_name(folder, path, "old", token, number)
        if exists(aside):
            posix.unlink(aside)
        if entry is None:
            remove_empty(folder, path)


def missing_folders(folder: str, path: str) -> list[str]:
    """Return the missing folders above a file, the deepest first."""
    missing = []
    above = folder_of(path)
    while above and not exists(folder + "/" + above):
        missing.append(folder + "/" + above)
        above = folder_of(above)
    return missing


def temporary_name(folder: str, path: str, kind: str, token: str, number: int) -> str:
    """Return a temporary name in a file's folder, because a rename within a folder never crosses file systems."""
    return f"{folder_of(folder + '/' + path)}/.{kind}-{token}-{number}"


def move(source: str, target: str, renames: list[tuple[str, str]]) -> None:
    posix.rename(source, target)
    renames.append((source, target))


def write_entry(place: str, entry: PatchEntry, like: str) -> None:
    """Write a new file. The mode in git's diff only sets whether the file is executable. The other bits are those of
    the replaced file at `like`, or of 644 if there is none."""
    if entry.mode == LINK_MODE:
        posix.symlink(entry.data.decode("utf-8", "surrogateescape"), place)
        return
    fd = posix.open(place, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o644)
    try:
        write_all(fd, entry.data)
        mode = posix.stat(like).st_mode & 0o7777 if exists(like) and not is_link(like) else 0o644
        readers = (mode & 0o444) >> 2  # every user who may read may execute
        posix.fchmod(fd, mode | readers if entry.mode == 0o100755 else mode & ~0o111)
    finally:
        posix.close(fd)


def remove_empty(folder: str, path: str) -> None:
    """Remove the folders left empty by a deletion, as git does."""
    above = folder_of(path)
    while above:
        try:
            posix.rmdir(folder + "/" + above)
        except OSError:
            return
        above = folder_of(above)
