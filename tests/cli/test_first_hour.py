"""The first hour of a new user, with the program and a terminal of 80 columns: the demo, the user's own agent, data set
and reward, and the mistakes that users make on the way.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

import outrider
from cli.world import PROGRAM

COLUMNS = 80
PACKAGE = Path(outrider.__file__ or "").parent
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

AGENT = """\
import json, os, urllib.request

messages = [{"role": "user", "content": os.environ["OUTRIDER_INSTRUCTION"]}]
body = json.dumps({"model": os.environ["OUTRIDER_MODEL"], "messages": messages}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OUTRIDER_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(request) as answer:
    reply = json.load(answer)["choices"][0]["message"]
with open("answer.txt", "w") as file:
    file.write(reply.get("content") or "")
"""
REWARD = """\
from outrider.evaluators.base import Outcome
from outrider.trajectory import Verdict


async def grade(outcome: Outcome) -> Verdict:
    answer = (await outcome.runtime.read("answer.txt")).decode()
    return Verdict(reward=float(len(answer) > 0), metrics={"characters": float(len(answer))})
"""
SET = """\
instruction = "Where is {row.item}?"

[harness]
command = ["python3", "agent.py"]

[runtime]
kind = "process"
prepare = [{ upload = "agent.py", to = "agent.py" }]

[evaluator]
kind = "callable"
path = "my_rewards:grade"

[sampling]
max_tokens = 16

[rows]
file = "rows.jsonl"
id = "name"
"""


class Shown(NamedTuple):
    code: int
    text: str

    def lines(self) -> list[str]:
        return self.text.splitlines()


class User:
    """Types commands in a folder. A command's output is the text that was sent to its terminal of 80 columns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")},
            "PYTHONPATH": f"{folder}:{PACKAGE.parent}",
            "TERM": "xterm",
        }

    def types(self, line: str, *, interrupt_at: str = "", **variables: str) -> Shown:
        """Run a command until it ends. With `interrupt_at`, Ctrl-C is typed once that text is shown."""
        words = shlex.split(line)
        assert words[0] == "outrider"
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        process = subprocess.Popen(
            [*PROGRAM, *words[1:]],
            cwd=self.folder,
            env=self.environment | variables,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        written, interrupted = b"", not interrupt_at
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # the program has closed the terminal
                break
            written += piece
            if not interrupted and interrupt_at.encode() in written:
                process.send_signal(signal.SIGINT)
                interrupted = True
        os.close(ours)
        # Only the last state of a line that is drawn anew, such as a progress bar, counts.
        text = ESCAPES.sub("", written.decode()).replace("\r\n", "\n")
        return Shown(process.wait(60), "\n".join(each.rsplit("\r", 1)[-1] for each in text.split("\n")))

    @contextmanager
    def serves(self, flags: str) -> Iterator[str]:
        process = subprocess.Popen(
            [*PROGRAM, "serve", "--port", "0", *shlex.split(flags)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            process.communicate(timeout=60)

    def writes(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text)
        return self.folder / name


def tables_fit(shown: Shown) -> bool:
    """Return whether nothing is cut, and the lines at and around the rules of tables fit the terminal."""
    ruled = [number for number, line in enumerate(shown.lines()) if set(line.strip()) == {"─"}]
    around = [line for number in ruled for line in shown.lines()[number - 1 : number + 2]]
    return bool(ruled) and "…" not in shown.text and max(map(len, around)) <= COLUMNS


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


@pytest.mark.deep
def test_the_first_hour(user: User) -> None:
    pytest.importorskip("torch")
    assert user.types("outrider --version").text.startswith("outrider ")

    demo = user.types("outrider demo")
    assert demo.code == 0, demo.text
    assert tables_fit(demo)
    assert "A session's reward is 1 if" in demo.text
    assert "bin/activate" in demo.text  # the program is not on the PATH
    serve = next(line for line in demo.lines() if line.startswith("  outrider serve "))
    run = next(line for line in demo.lines() if line.startswith("  outrider run "))

    user.writes("agent.py", AGENT)
    user.writes("my_rewards.py", REWARD)
    rows = [{"name": f"row-{number}", "item": item} for number, item in enumerate(["maple", "grape"] * 10)]
    user.writes("rows.jsonl", "\n".join(map(json.dumps, rows)))
    user.writes("set.toml", SET)

    with user.serves(f"{serve.split('serve ')[1]} --allow-plugin my_rewards") as url:
        example = user.types(f"{run.strip()} --url {url}")
        assert example.code == 0, example.text  # the demo's own reward is allowed beside the user's
        assert tables_fit(example)

        stopped = user.types(f"outrider run set.toml -n 4 --resume mine --url {url}", interrupt_at="submitted")
        assert stopped.code == 130, stopped.text
        assert "--resume mine" in stopped.text
        rolled = user.types(f"outrider run set.toml -n 4 --resume mine --url {url}")
        assert rolled.code == 0, rolled.text
        assert tables_fit(rolled)
        assert re.search(r"^ *20 +80 +80 ", rolled.text, re.M), rolled.text
        export = rolled.text.split("its training rows: ")[1].strip()
        exported = user.types(export)
        assert "80 samples of 20 groups" in exported.text
        status = user.types(f"outrider status --url {url}")
        assert tables_fit(status)
        group = re.findall(r"g-[0-9a-f]+", status.text)[0]
        shown = user.types(f"outrider show s{group[1:]}-0 --url {url}")
        assert shown.code == 0, shown.text
        assert max(len(line) for line in shown.lines() if line.startswith("── turn")) <= COLUMNS
    lines = [json.loads(line) for line in (user.folder / "mine.jsonl").read_text().splitlines()]
    assert len(lines) == 80
    assert {line["reward"] for line in lines} <= {0.0, 1.0}
    assert all(len(line["ids"]) == len(line["loss_mask"]) for line in lines)


@pytest.mark.deep
def test_the_mistakes_of_the_first_hour(user: User) -> None:
    user.writes("rows.jsonl", '{"name": "a", "item": "maple"}\n')
    user.writes("agent.py", AGENT)
    user.writes("my_rewards.py", REWARD)
    user.writes("set.toml", SET)
    user.writes("misspelt.toml", SET.replace("max_tokens", "max_token"))
    user.writes("missing.toml", SET.replace("row.item", "row.itme"))
    user.writes("gone.toml", SET.replace("rows.jsonl", "gone.jsonl"))
    user.writes("unknown.toml", SET.replace('id = "name"', 'name = "name"'))
    user.writes("elsewhere.toml", SET.replace("my_rewards", "nowhere"))
    graded = SET.partition("[evaluator]")[0] + '[evaluator]\nrun = "true"\n[rows]\nfile = "rows.jsonl"\n'
    user.writes("no-agent.toml", graded.replace('upload = "agent.py"', 'upload = "agnt.py"'))
    user.writes("crash.toml", graded.replace('"agent.py"]', '"nothing.py"]'))
    script = user.writes("script.json", '{"replies": ["hello"]}')

    def hints(line: str, error: str, hint: str, **variables: str) -> None:
        shown = user.types(line, **variables)
        assert shown.code in (1, 2), shown.text
        assert error in " ".join(shown.text.split()), shown.text
        assert hint in " ".join(shown.text.split()), shown.text
        assert "Traceback" not in shown.text

    nobody = "http://127.0.0.1:9"
    hints(f"outrider run set.toml --url {nobody}", "cannot reach the service", "hint: start one with `outrider serve`")
    hints("outrider status --url 127.0.0.1:8700", "has no scheme", "hint: write http://127.0.0.1:8700")
    hints("outrider status --url 8700", "has no scheme", "hint: write http://127.0.0.1:8700")
    hints(
        "outrider status --url http://127.0.0.1:99999", "'http://127.0.0.1:99999', is not valid: Port out of range", ""
    )
    hints("outrider status --url http://nowhere.invalid", "cannot reach the service", "hint: start one")
    hints("outrider serve --engine vllm=localhost:8000", "has no scheme", "hint: write vllm=http://localhost:8000")
    hints("outrider runn set.toml", "No such command 'runn'", "Did you mean 'run'")
    hints("outrider run sett.toml", "sett.toml", "")
    hints("outrider run misspelt.toml", "task.sampling.max_token: ", "unknown field; did you mean 'max_tokens'?")
    hints("outrider run missing.toml", "itme", "item")
    hints("outrider run gone.toml", "there is no gone.jsonl", "is relative to the folder of that file")
    hints("outrider run unknown.toml", "unknown field `name`", "may have `id`")
    hints("outrider run set.toml -n 0", "n: task 'a' of set.toml: must be at least 1", "")
    hints("outrider demo --out agent.py", "out: cannot write to the folder agent.py: File exists", "--out DIR")
    broken = '[{"kind": "vllm" "url": "http://x"}]'
    hints(
        "outrider serve",
        "OUTRIDER_ENGINES is not JSON in line 1, character 18",
        "hint: a list",
        OUTRIDER_ENGINES=broken,
    )
    hints(
        "outrider serve", "setting 'lanes.rum' from OUTRIDER_LANES__RUM", "did you mean 'run'?", OUTRIDER_LANES__RUM="3"
    )
    policy = PACKAGE / "lab" / "demo" / "policy"
    model = f"--tokenizer {policy} --renderer template:qwen3"
    down = "engine 'vllm-0' is not healthy: at http://127.0.0.1:9: [Errno 111] Connection refused hint: is its server"
    hints(f"outrider serve --engine vllm=http://127.0.0.1:9 {model}", "starting a service on the data folder", down)
    with user.serves(f"--engine scripted={script} {model} --allow-plugin nowhere") as url:
        began = time.monotonic()
        hints(f"outrider run set.toml --url {url}", "my_rewards", "outrider serve --allow-plugin my_rewards")
        tls = url.replace("http://", "https://")
        hints(f"outrider status --url {tls}", f"no TLS connection to the service at {tls}", "begins with http://")
        hints(f"outrider run elsewhere.toml --url {url}", "No module named 'nowhere'", "name its folder in PYTHONPATH")
        hints(
            f"outrider run no-agent.toml --url {url}", "'agnt.py' cannot be uploaded", "put it beside the task's file"
        )
        hints(
            f"outrider run crash.toml --url {url}", "1 not graded: harness_error", "what went wrong: outrider show s-"
        )
        hints(f"outrider status g-none --url {url}", "no group 'g-none'", "`outrider status` lists the newest groups")
        hints(f"outrider show s-none --url {url}", "no session 's-none'", "ends with its number")
        assert time.monotonic() - began < 60
        hints(f"outrider export --format csv --url {url}", "'--format': 'csv' is", "outrider export --help")
        hints(f"outrider show s-none-0 --url {url}", "s-none-0", "")
