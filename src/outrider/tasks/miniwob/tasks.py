"""Makes tasks of MiniWoB: the screen of a sandbox shows a web page of the package miniwob. The text of the page
contains the agent's instruction.

This module runs and downloads nothing, and does not import the package. Nodes do not need the package, because a task
contains its page. Invariants: the same page and random seed make the same task; only the reward that the page computes
(`page.js`) counts.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
import io
import json
import re
import tarfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from outrider.errors import InvalidField
from outrider.harnesses.desktop import DISPLAY, OBSERVATIONS
from outrider.tasks.examples import Example, Gold

INSTALL = "pip install --no-deps 'miniwob>=1.1,<1.2'"
SCREENSHOT = "screenshot"
FOLDER = "/miniwob"
"""Folder of the web pages in the sandbox."""
BROWSER = "/usr/lib/chromium/chromium"
"""Path of the browser of Debian's package. /usr/bin/chromium is only a script, and it needs files in /etc that
sandboxes do not have."""
POLICY = "/etc/chromium/policies/managed/miniwob.json"
FONTS = f"{FOLDER}/fonts.conf"
# The pages are designed for Arial. Without font settings, which sandboxes do not have, Chromium would use a serif font.
FONT_SETTINGS = """\
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <dir>/usr/share/fonts</dir>
  <cachedir>/tmp/fontconfig</cachedir>
  <match target="pattern">
    <test name="family"><string>Arial</string></test>
    <edit name="family" mode="assign_replace" binding="same">
      <string>Liberation Sans</string><string>DejaVu Sans</string>
    </edit>
  </match>
</fontconfig>
"""
WIDTH, HEIGHT, SCALE = 664, 428, 2
"""Size of the screen in pixels, and the browser's zoom factor. The screen shows 332 by 214 CSS pixels of a page, as in
BrowserGym's MiniWoB."""
INSTRUCTION = """\
The screen shows a web page. It says what to do in the yellow field at its top. Look at the screen, and do that with
mouse and keyboard. The page says when the task has ended. Then reply without calling a tool.
"""
REFERENCE = re.compile(r"\.\./((?:core|common)/[\w./-]+)")
PAGE_FOLDER = "miniwob"

# xdotool fails if any window disappears during the search. Some windows of a starting browser do disappear, so the
# search is repeated.
TITLE = """\
titled() {
    for try in $(seq "$2"); do
        title=$(xdotool search --onlyvisible --name "^miniwob-$1" getwindowname %1 2>/dev/null) && return
        sleep 0.2
    done
    return 1
}
"""
"""Shell function `titled PREFIX TIMES`: sets the variable `title` to the title of the window whose title begins with
miniwob-PREFIX. It searches up to TIMES times."""

# --no-sandbox: the browser's own sandbox needs namespaces, which programs in a sandbox may not create. --test-type
# hides a warning about this. --force-renderer-accessibility adds the page to the accessibility tree.
OPEN = f"""\
{TITLE}
FONTCONFIG_FILE={FONTS} setsid {BROWSER} --no-sandbox --test-type --no-first-run --disable-gpu \\
    --disable-background-networking --force-device-scale-factor={SCALE} --kiosk \\
    ${{AT_SPI_BUS_ADDRESS:+--force-renderer-accessibility}} \\
    --user-data-dir=/tmp/chromium --app=URL </dev/null >/tmp/chromium.log 2>&1 &
titled "" 500 && exit
tail -n 5 /tmp/chromium.log
exit 1
"""

# A missing display is an error, because the sandbox is broken. A missing page gets reward 0, because the agent closed
# it.
GRADE = f"""\
{TITLE}
export DISPLAY={DISPLAY}
xdotool getdisplaygeometry >/dev/null || exit 2
verdict() {{ printf '{{"reward": %s, "metrics": %s, "reason": "%s"}}' "$@" >"$OUTRIDER_VERDICT"; }}
if ! titled "" 10; then
    verdict 0 '{{"closed": 1}}' "the page is closed"
elif [ "${{title#miniwob-reward }}" != "$title" ]; then
    set -- $title
    verdict "$2" "{{\\"raw_reward\\": $3}}" "the page gives $3"
else
    verdict 0 '{{}}' "the page waits for its end"
fi
"""

SOLVE = f"""\
{TITLE}
export DISPLAY={DISPLAY}
titled "gold " 50 || exit 1
plan=${{title#miniwob-gold }}
printf '%s\\n' "${{plan% - Chromium}}" | tr ';' '\\n' | while read -r action rest; do
    case $action in
        click) xdotool mousemove $rest click 1 ;;
        drag) set -- $rest
            xdotool mousemove "$1" "$2" mousedown 1 sleep 0.05 mousemove "$3" "$4" sleep 0.05 mouseup 1 ;;
        type) xdotool type --delay 20 -- "$rest" ;;
    esac
    sleep 0.3
done
titled "reward " 50
"""


def miniwob_pages(html: Path | None = None) -> dict[str, Path]:
    """Return the HTML files of all pages, by the name of the page. `html` is the folder `html` of the package miniwob.
    None means the installed package. Raises InvalidField."""
    if html is None:
        found = importlib.util.find_spec("miniwob")
        if found is None or not found.submodule_search_locations:
            raise InvalidField("the package miniwob is not installed", field="source", hint=INSTALL)
        html = Path(found.submodule_search_locations[0], "html")
    pages = {path.stem: path for path in sorted((html / PAGE_FOLDER).glob("*.html"))}
    if not pages:
        raise InvalidField(f"{html} has no pages of MiniWoB", field="source", hint=INSTALL)
    return pages


def miniwob_examples(
    page: str | None = None,
    *,
    size: int | None = None,
    seed: int = 0,
    observation: str = SCREENSHOT,
    html: Path | None = None,
) -> list[Example]:
    """Return tasks of MiniWoB. Pages that `gold.js` can solve have a known solution. Raises InvalidField.

    page: the page of all tasks, with the seeds `seed`, `seed` + 1, and so on. None means a task with the seed `seed`
        for each page.
    size: the number of tasks. Without a `page`, the maximum number of pages.
    observation: how the agent sees the screen.
    html: see `miniwob_pages`."""
    if observation not in OBSERVATIONS:
        raise InvalidField(
            f"{observation!r} is no way to show a page", field="source", hint=f"one of: {', '.join(OBSERVATIONS)}"
        )
    pages = miniwob_pages(html)
    if page is None:
        return [_example(pages[name], seed, observation) for name in list(pages)[:size]]
    if page not in pages:
        raise InvalidField(f"MiniWoB has no page {page!r}", field="source", hint=f"it has: {', '.join(pages)}")
    return [_example(pages[page], seed + number, observation) for number in range(1 if size is None else size)]


def _example(page: Path, seed: int, observation: str) -> Example:
    name = page.stem
    html = page.read_text("utf-8")
    place = f"{FOLDER}/{PAGE_FOLDER}/{name}.html"
    url = f"file://{place}"
    shown = _with_script(html, _script("page.js").replace("SEED", str(seed)))
    policy = {
        "AllowFileSelectionDialogs": False,
        "DeveloperToolsAvailability": 2,
        "IncognitoModeAvailability": 1,
        "PrintingEnabled": False,
        "URLAllowlist": [url],
        "URLBlocklist": ["*", "chrome://*", "javascript://*"],
    }
    prepare: list[dict[str, Any]] = [
        {"write": json.dumps(policy), "to": POLICY},
        {"write": _archive(page, html), "to": f"{FOLDER}/parts.tar.gz", "encoding": "base64"},
        {"run": f"tar -xzf {FOLDER}/parts.tar.gz -C {FOLDER}"},
        {"write": FONT_SETTINGS, "to": FONTS},
        {"write": shown, "to": place},
    ]
    desktop = {"width": WIDTH, "height": HEIGHT, "run": OPEN.replace("URL", url), "observation": observation}
    task = {
        "instruction": INSTRUCTION,
        "harness": {"agent": "tools", "options": {"tools": ["desktop"], "max_turns": 30, "desktop": desktop}},
        "runtime": {"prepare": prepare},
        "evaluator": {"run": GRADE, "seconds": 60},
        "labels": {"miniwob": name},
    }
    gold = None
    solver = _script("gold.js")
    if f'"{name}":' in solver:
        solved = _with_script(shown, solver.replace("TASK", json.dumps(name)))
        gold = Gold(run=SOLVE, files=({"write": solved, "to": place},))
    return Example(id=f"{name}-{seed}", task=task, row={"page": name, "seed": seed}, gold=gold)


def _script(name: str) -> str:
    return files("outrider.tasks.miniwob").joinpath(name).read_text("utf-8")


def _with_script(html: str, script: str) -> str:
    """Return the page's text with a script added at the end of its body."""
    head, end, tail = html.rpartition("</body>")
    return f"{head}<script>\n{script}</script>\n{end}{tail}"


def _archive(page: Path, html: str) -> str:
    """Pack the files that a page uses into a tar.gz archive, in base64. The same files always give the same text.

    If a page computes the names of files, its text contains only the folder of these files. Therefore all files in this
    folder are packed. If a page uses a stylesheet, the files in the folder `images` beside it are packed, too."""
    folder = page.parent.parent
    used = sorted({folder / found for found in REFERENCE.findall(html)})
    folders = [file.parent / "images" if file.suffix == ".css" else file for file in used]
    used += [inner for inner_folder in folders for inner in sorted(inner_folder.glob("*.*"))]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in dict.fromkeys(used):
            if file.is_file():
                member = tarfile.TarInfo(str(file.relative_to(folder)))
                member.size = file.stat().st_size
                archive.addfile(member, io.BytesIO(file.read_bytes()))
    return base64.b64encode(gzip.compress(packed.getvalue(), mtime=0)).decode()
