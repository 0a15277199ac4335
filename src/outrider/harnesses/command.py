"""The command harness: runs an agent program in the sandbox, without a terminal.

Invariant: every variable from which agents read the model endpoint has the session's value, even if the task sets this
variable.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from outrider.errors import LOG_TAIL, HarnessError, InvalidField, RuntimeFailure
from outrider.harnesses.base import HarnessContext, HarnessOutcome, ProgramExit
from outrider.harnesses.common_options import ALLOWED_TOOLS
from outrider.harnesses.endpoint_variables import endpoint_environment, folder_environment
from outrider.harnesses.install import installation, unavailable
from outrider.harnesses.mcp_servers import with_servers
from outrider.harnesses.missing_program import find_missing, search_path
from outrider.harnesses.placeholders import Verbatim, fill, fill_file, merged, yaml_string
from outrider.harnesses.presets import DIALECT, ConfigFile, OptionValue, Preset
from outrider.harnesses.skills import copy_skills, find_skills
from outrider.harnesses.venv import COMPILE_SECONDS, compile_modules, read_venv
from outrider.sandbox.runtimes.base import Availability, Runtime
from outrider.spec import McpServer

LOOKUP_SECONDS = 60.0
"""Time limit in seconds of a short lookup command in the sandbox."""

MAX_INSTRUCTION = 100_000
"""Maximum bytes of an instruction. Linux refuses any argument or variable above 128 KiB, and an argument may contain
other text besides the instruction."""

TAIL_OF_NEWEST = (
    f'newest=$(ls -td {{patterns}} 2>/dev/null | head -n 1); [ -f "$newest" ] && tail -c {LOG_TAIL} "$newest"'
)
"""Shell script that prints the end of the newest log file. It can parse the output of `ls`, because no agent program
puts newlines into the names of its logs."""

OWN_SETTINGS = "give MCP servers by task.harness.mcp_servers, and skills by task.harness.skills"

FIND_HOME = 'printf %s "$HOME"'


class CommandHarness:
    """Runs a preset with its checked `options`.

    env: the task's own variables. They override the preset's variables, but never those of the model endpoint.
    venv: the path of the virtual environment for the program, or None."""

    def __init__(
        self,
        preset: Preset,
        options: Mapping[str, OptionValue],
        env: Mapping[str, str],
        *,
        venv: str | None = None,
        servers: Sequence[McpServer] = (),
        skills: Sequence[str] = (),
        guarded: bool = False,
    ) -> None:
        self._preset = preset.with_options(options)
        self._options = dict(options)
        self._home = ""  # HOME in the sandbox, set by `install`
        self._env = dict(env)
        self._venv = venv
        self._servers = servers
        self._skills = skills
        self._guarded = guarded
        self._installed = False

    def available(self) -> Availability:
        if self._preset.install is None:
            return Availability(ok=True, detail="needs no program of its own on the node")
        found = installation(self._preset)
        if found is None:
            error = unavailable(self._preset)
            return Availability(ok=False, detail=error.message, hint=error.hint)
        return Availability(ok=True, detail=f"{self._preset.install.version} in {found.prefix}")

    def mounts(self) -> tuple[Path, ...]:
        found = installation(self._preset)
        return (*(found.mounts if found else ()), *(read_venv(self._venv).shown if self._venv else ()))

    async def install(self, context: HarnessContext) -> None:
        """Prepare the task's virtual environment, write the preset's config files, and copy the skills.

        Raises InvalidField if the instruction cannot be passed to a program, if the virtual environment is missing or
        broken, or if an MCP server or a skill is not in the sandbox. Also raises InvalidField if the sandbox already
        has one of the preset's files. Raises HarnessUnavailable if the program is not installed, and HarnessError if
        the sandbox has no HOME."""
        check_instruction(context.task.instruction)
        words = self._words(context)
        if self._venv is not None:
            venv = await asyncio.to_thread(read_venv, self._venv)
            seconds = min(COMPILE_SECONDS, context.task.limits.session_seconds / 2)
            await compile_modules(venv, seconds=seconds)
            # The environment's programs come before the PATH of the task or of the sandbox, as after `activate`.
            inherited = await search_path(context.runtime, self._env, seconds=LOOKUP_SECONDS)
            self._env = {**self._env, "VIRTUAL_ENV": str(venv.prefix), "PATH": f"{venv.prefix}/bin:{inherited}"}
        files = self._preset.files_with(self._servers)
        if not files and not self._skills:
            return
        env = self._environment(context, words)
        done = await context.runtime.exec(FIND_HOME, env=env, seconds=LOOKUP_SECONDS)
        home = PurePosixPath(done.stdout.decode("utf-8", errors="replace"))
        if done.exit_code != 0 or not home.is_absolute():
            raise HarnessError(
                f"the sandbox has no HOME for {self._preset.name}'s config files",
                hint="set HOME in task.harness.env, or use an image whose user has one",
                log_tail=done.log_tail(),
            )
        self._home = str(home)
        words = self._words(context)
        # Only the first step is checked. At later steps, the sandbox has the files of the previous step, and the agent
        # may have changed them.
        first, self._installed = not self._installed, True
        if first:
            for number, server in enumerate(self._servers):
                await self._check_command(context.runtime, server, env, number)
        for file in files:
            # This runs in a thread, because the text may have several megabytes.
            text = await asyncio.to_thread(self._text_of, file, words)
            path = str(home / file.path)
            if first and self._guarded:
                await self._check_free(context.runtime, path, text.encode())
            await context.runtime.write(path, text.encode(), executable=file.executable)
        if first and self._skills and self._preset.skills is not None:
            found = await find_skills(context.runtime, self._skills)
            await copy_skills(context.runtime, found, str(home / self._preset.skills.folder))

    def _text_of(self, file: ConfigFile, words: Mapping[str, str]) -> str:
        text = _file_text(file, words)
        settings = self._preset.mcp
        return with_servers(text, settings, self._servers) if settings and settings.file == file.path else text

    async def _check_free(self, runtime: Runtime, path: str, data: bytes) -> None:
        """Raise InvalidField if the sandbox already has a file at `path` whose content is not `data`."""
        try:
            if await runtime.read(path) == data:
                return
        except FileNotFoundError:
            return
        except (IsADirectoryError, RuntimeFailure):
            pass  # there is a folder, or a file that cannot be read
        raise InvalidField(
            f"{path} is in the sandbox, and harness {self._preset.name!r} writes a file of its own there",
            field="task.runtime.prepare",
            hint=f"do not write the file in a prepare step or in the image; {OWN_SETTINGS}",
        )

    async def _check_command(self, runtime: Runtime, server: McpServer, env: Mapping[str, str], number: int) -> None:
        """Raise InvalidField if the sandbox does not have the command of an MCP server. Most agent programs would
        continue without the server's tools."""
        if server.command is None:
            return
        found = await runtime.exec(
            f"command -v {shlex.quote(server.command)}", env={**env, **server.env}, seconds=LOOKUP_SECONDS
        )
        if found.exit_code != 0:
            raise InvalidField(
                f"the sandbox has no program {server.command!r} for the MCP server {server.name!r}",
                field=f"task.harness.mcp_servers.{number}.command",
                hint="install the program in the image, or bring it in a prepare step or a mount",
            )

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        words = self._words(context)
        command = [fill(part, words) for part in self._preset.command]
        environment = self._environment(context, words)
        result = await context.runtime.exec(
            command,
            env=environment,
            stdin=fill(self._preset.stdin, words).encode(),
            # This is only an upper bound: the session's own time limit ends the program earlier. Time in which the
            # service is suspended counts for the bound here, but not for the session's limit.
            seconds=context.task.runtime.lifetime_seconds,
        )
        log_tail = result.log_tail()
        if self._preset.logs:
            script = TAIL_OF_NEWEST.format(patterns=" ".join(f'"$HOME"/{pattern}' for pattern in self._preset.logs))
            try:
                found = await context.runtime.exec(script, env=environment, seconds=LOOKUP_SECONDS)
                own = found.stdout.decode("utf-8", errors="replace").strip()
                log_tail += f"\n--- {self._preset.name}'s own log ---\n{own}" if own else ""
            except RuntimeFailure as error:  # the program has ended, so an unreadable log must not change the outcome
                log_tail += f"\n--- {self._preset.name}'s own log cannot be read: {error} ---"
        if result.exit_code != 0:
            missing = await find_missing(context.runtime, command, environment, result)
            if result.exit_code is None:
                ended = f"was killed after {result.seconds:.0f} s"
            elif 128 < result.exit_code <= 128 + signal.SIGRTMAX:
                ended = f"was killed by signal {result.exit_code - 128}"
            else:
                ended = f"exited with code {result.exit_code}"
            message = f"{self._preset.name} {ended}{f': {missing.message}' if missing else ''}"
            hint = "the log tail is the end of the program's output" + (" and log" if self._preset.logs else "")
            if missing:
                hint = missing.hint
            if result.exit_code is None or self._preset.nonzero_exit == "error":
                raise HarnessError(message, hint=hint, log_tail=log_tail)
            raise ProgramExit(message, exit_code=result.exit_code, hint=hint, log_tail=log_tail)
        answer = result.stdout.decode("utf-8", errors="replace").strip() if self._preset.answer else None
        return HarnessOutcome(log_tail=log_tail, answer=answer)

    def _words(self, context: HarnessContext) -> dict[str, str]:
        """Return the values of all placeholders that the preset's texts may use. Raises HarnessUnavailable if the
        program is not installed."""
        endpoint = context.endpoint
        words = {
            "base_url": endpoint.base_url,
            "api_key": endpoint.api_key,
            "model": endpoint.model,
            "instruction": context.task.instruction,
        }
        options: dict[str, str] = {}
        for name, value in self._options.items():
            option = self._preset.options[name]
            if isinstance(value, tuple):
                value = (*value, *(self._of_servers() if name == ALLOWED_TOOLS else ()))
                options[f"option.{name}"] = ",".join(value)
                options[f"option.{name}.list"] = Verbatim(json.dumps(value))
                options[f"option.{name}.members"] = Verbatim(json.dumps(dict.fromkeys(value, True))[1:-1])
                continue
            # Booleans are `true` and `false`, as in JSON and TOML.
            text = str(value).lower() if isinstance(value, bool) else str(value)
            text = option.spelling.get(text, text)
            options[f"option.{name}"] = fill(text, words) if option.type == "template" else text
        own = self._preset.words.get(str(self._options.get(DIALECT) or next(iter(self._preset.dialects), "")), {})
        dialect = {f"dialect.{name}": fill(text, words) for name, text in own.items()}
        places: dict[str, str] = {}
        if self._preset.install is not None:
            found = installation(self._preset)
            if found is None:
                raise unavailable(self._preset)
            places = found.words() | {"instruction.yaml": yaml_string(context.task.instruction)}
            places |= {"home": self._home} if self._home else {}
        return words | options | dialect | places

    def _of_servers(self) -> list[str]:
        """Return entries for the program's list of allowed tools. Each entry allows all tools of one of the task's MCP
        servers."""
        allowed = self._preset.mcp.allowed if self._preset.mcp else ""
        return [allowed.format(server=server.name) for server in self._servers] if allowed else []

    def _environment(self, context: HarnessContext, words: Mapping[str, str]) -> dict[str, str]:
        preset = self._preset
        servers = preset.mcp.env if preset.mcp and self._servers else {}
        skills = preset.skills.env if preset.skills and self._skills else {}
        own = {name: fill(text, words) for name, text in (preset.env | servers | skills | self._env).items()}
        given = endpoint_environment(context.endpoint, context.task.instruction, context.ids)
        return own | given | folder_environment(context.folders)


def _file_text(file: ConfigFile, words: Mapping[str, str]) -> str:
    text, *added = (fill_file(file.path, text, words) for text in (file.text, *file.added))
    return merged(file.path, text, added)


def check_instruction(instruction: str) -> None:
    """Raise InvalidField if the instruction cannot be passed to a program."""
    if "\0" in instruction:
        raise InvalidField(
            "must not contain NUL, because programs get it as an argument or variable", field="task.instruction"
        )
    if (size := len(instruction.encode())) > MAX_INSTRUCTION:
        raise InvalidField(
            f"has {size} bytes, more than the {MAX_INSTRUCTION} that a program can get",
            field="task.instruction",
            hint="put the long part into a file with a prepare step",
        )
