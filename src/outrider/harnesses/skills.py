"""Finds a task's skills in the sandbox, and copies them to the folder from which an agent program reads skills.

A skill is a folder with a SKILL.md, which begins with the skill's name and description between two lines `---`.
Invariant: no skill of the program or of the task is replaced.
"""

from __future__ import annotations

import glob
import posixpath
import re
from collections.abc import Sequence

import msgspec

from outrider.errors import HarnessError, InvalidField, storable
from outrider.sandbox.runtimes.base import Runtime

FIELD = "task.harness.skills"
SKILL = "SKILL.md"
MAX_SKILL = 1 << 20
"""Maximum bytes of a file SKILL.md."""
MAX_SKILLS = 256
COPY_SECONDS = 60.0

COPY = """
mkdir -p "$0" || exit 1
for folder in "$@"; do
  name=${folder##*/}
  if [ -e "$0/$name" ]; then printf %s "$name"; exit 3; fi
  cp -RL -- "$folder" "$0/$name" || exit 1
done
"""
"""Shell script that copies folders into the folder $0. If one of the copied folders has the same name as a file or
folder that is already in $0, the script prints this name and exits with 3."""
TAKEN = 3

_HEAD = re.compile(r"\A---[ \t]*\r?\n(?P<lines>.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_VALUE = r"^{}:[ \t]*(?P<value>.*(?:\n[ \t]+.*)*)"


class Skill(msgspec.Struct, frozen=True, kw_only=True):
    """A skill in the sandbox: its folder, and the name and the description from its SKILL.md."""

    name: str
    description: str
    folder: str


async def find_skills(runtime: Runtime, paths: Sequence[str]) -> list[Skill]:
    """Return the skills at the paths that a task gives. Raises InvalidField for a path without skills, and for a
    SKILL.md that agent programs could not read."""
    found: list[Skill] = []
    for number, path in enumerate(paths):
        field = f"{FIELD}.{number}"
        path = posixpath.normpath(path)
        inner = sorted(await runtime.glob(f"{glob.escape(path)}/*/{SKILL}"))
        own = f"{path}/{SKILL}"
        files = [own] if await _exists(runtime, own) else inner
        if not files:
            raise InvalidField(
                f"there is no {SKILL} in {path!r}, and none in its folders",
                field=field,
                hint="bring the skill into the sandbox: in a prepare step, or with the image",
            )
        if odd := next((file for file in files if storable(file) != file), None):
            raise InvalidField(f"the path {storable(odd)} is not UTF-8, so no model could name it", field=field)
        found += [_parsed(await _read(runtime, file, field), file, field) for file in files]
        if len(found) > MAX_SKILLS:
            raise InvalidField(f"has more than {MAX_SKILLS} skills", field=field)
        names = [posixpath.basename(skill.folder) for skill in found]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise InvalidField(f"two skills are in folders named {repeated!r}", field=field)
    return found


async def copy_skills(runtime: Runtime, skills: Sequence[Skill], target: str) -> None:
    """Copy the skills into the folder `target`. Raises InvalidField if `target` already contains a file or folder with
    the name of a skill's folder, and HarnessError if a skill cannot be copied."""
    folders = [skill.folder for skill in skills]
    done = await runtime.exec(["sh", "-c", COPY, target, *folders], seconds=COPY_SECONDS)
    if done.exit_code == TAKEN:
        name = done.stdout.decode("utf-8", errors="replace")
        raise InvalidField(
            f"{target}/{name} is in the sandbox before the skill {name!r} is copied there",
            field=FIELD,
            hint=f"leave the skill out of {FIELD}, or do not write it to the program's own folder",
        )
    if done.exit_code != 0:
        raise HarnessError(f"the skills cannot be copied to {target}", log_tail=done.log_tail())


def described(skills: Sequence[Skill]) -> str:
    """Describe the skills to the model, for an agent that does not support skills itself."""
    lines = (f"- {skill.name}: {skill.description} ({skill.folder}/{SKILL})" for skill in skills)
    return "\n".join(("You have skills. Read the file of a skill before you do what the skill is for.", *lines))


async def _read(runtime: Runtime, file: str, field: str) -> bytes:
    try:
        return await runtime.read(file, limit=MAX_SKILL)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise InvalidField(
            f"{file} is a folder, or a link to a file that does not exist", field=field, hint="write it as a file"
        ) from error


async def _exists(runtime: Runtime, path: str) -> bool:
    return bool(await runtime.glob(glob.escape(path)))


def _parsed(data: bytes, file: str, field: str) -> Skill:
    head = _HEAD.match(data.decode("utf-8", errors="replace"))
    values: dict[str, str] = {}
    for name in ("name", "description"):
        value = head and re.search(_VALUE.format(name), head["lines"], re.MULTILINE)
        text = re.sub(r"\A[>|][+-]?\s+", "", value["value"]) if value else ""
        values[name] = " ".join(text.split()).strip("\"'")
        if not values[name]:
            raise InvalidField(
                f"{file} has no {name}, so that programs do not offer the skill",
                field=field,
                hint="begin the file with a line ---, a line name: NAME, a line description: TEXT and a line ---",
            )
    return Skill(name=values["name"], description=values["description"], folder=posixpath.dirname(file))
