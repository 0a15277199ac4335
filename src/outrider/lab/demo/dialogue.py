"""Writes dialogues of the demo task, to train the policy: the prompt, the expected replies of the model, and the
sandbox's output.

Invariant: each piece of a dialogue is encoded separately, as in the service, so that training and service use the same
ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from outrider.harnesses.toolbox import TOOLS
from outrider.lab.demo.task import Episode, answer_for, command_for, file_for
from outrider.tokens.rendering.chat_template import ChatTemplate
from outrider.tokens.rendering.tokenizer import Tokenizer

POLICY = Path(__file__).parent / "policy"
"""The folder of the policy shipped with the package, in Hugging Face layout."""

RENDERER = "template:qwen3"
"""Qwen3's format, rendered with the policy's own chat template. The settings must name the renderer. By default, the
service chooses a renderer by the model's name, and this works only for public models."""

END = "<|im_end|>"


class Piece(msgspec.Struct, frozen=True):
    """A part of a dialogue. `spoken` is True if the model wrote the text."""

    text: str
    spoken: bool


class Script:
    """Writes dialogues. The policy's own chat template renders the first prompt, and later turns are written in Qwen3's
    format."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    @classmethod
    def load(cls, folder: Path = POLICY) -> Script:
        return cls(ChatTemplate.load(folder))

    def prompt(self, question: str) -> str:
        return self._template.render([{"role": "user", "content": question}], [TOOLS["bash"]])

    def call(self, item: str) -> str:
        arguments = json.dumps({"command": command_for(item)})
        return f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>{END}'

    def result(self, output: str) -> str:
        """Return the text from the end of a tool call to the start of the model's next reply, with the tool's
        output."""
        turn = f"<|im_start|>user\n<tool_response>\n{output}\n</tool_response>{END}\n"
        return f"\n{turn}<|im_start|>assistant\n"

    def read(self, episode: Episode, item: str, zone: str) -> list[Piece]:
        """Return a dialogue in which the model first reads the file of `item`, and then answers with `zone`."""
        return [
            Piece(self.prompt(episode.question), False),
            Piece(self.call(item), True),
            Piece(self.result(tool_output(episode, command_for(item)) or ""), False),
            Piece(answer_for(zone) + END, True),
        ]

    def guess(self, episode: Episode, zone: str) -> list[Piece]:
        """Return a dialogue in which the model answers with `zone` and does not read the file."""
        return [Piece(self.prompt(episode.question), False), Piece(answer_for(zone) + END, True)]


def tool_output(episode: Episode, command: str) -> str | None:
    """Return what the agent's bash tool prints in the episode's sandbox. Only `cat` with a name of letters is imitated.
    For any other command, returns None."""
    match command.split():
        case ["cat", name] if name == episode.item:
            return file_for(episode.zone).removesuffix("\n")
        case ["cat", name] if name.isalpha():
            return f"cat: {name}: No such file or directory\n[exit code 1]"
        case _:
            return None


def encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> tuple[list[int], list[bool]]:
    """Return the ids of a dialogue, and a flag for each id: True if the model wrote it."""
    ids: list[int] = []
    spoken: list[bool] = []
    for piece in pieces:
        new = tokenizer.encode(piece.text)
        ids += new
        spoken += [piece.spoken] * len(new)
    return ids, spoken
