"""An engine whose tokens show which policy version sampled them, for tests of weight updates."""

from __future__ import annotations

import asyncio
import string
from collections.abc import AsyncGenerator
from pathlib import Path

from outrider.engines.base import Chunk, EngineHealth, GenerateRequest, PauseMode
from outrider.engines.gates import PauseGate
from outrider.errors import EngineRejected, EngineUnavailable
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, LogprobKind, TokenMode, VersionSpan


class StampingEngine:
    """Implements `Engine`, `SetsVersion` and `LoadsWeights`.

    A reply is `length` letters and the end token. Each letter stands for the version that sampled it (a for 0). A
    generation counts the letters at the end of its prompt as part of the reply, so a reply that is cut and continued is
    as long as any other.

    - `labels`: True if the engine reports version spans.
    - `hold`: stops all generations after this many further tokens in total, until `release` is called. `held` is set
      when a generation stops.
    - `fails`: the errors that operations raise: "generate", "pause", "update_weights", "set_version", "resume".
    """

    mode = TokenMode.TOKENS
    logprob_kind = LogprobKind.SAMPLING

    def __init__(self, tokenizer: Path, *, name: str = "stamping", length: int = 20, labels: bool = True) -> None:
        loaded = Tokenizer.load(tokenizer)
        self.name = name
        self.letters = [loaded.encode(letter)[0] for letter in string.ascii_lowercase]
        self.end = loaded.encode("<|im_end|>")[0]
        self.version = 0
        self.loaded: list[str] = []
        self.told: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.sampled = 0
        self.held = asyncio.Event()
        self.requests: list[GenerateRequest] = []
        self._length = length
        self._labels = labels
        self._hold: int | None = None
        self._down = False
        self._aborts = 0
        self._gate = PauseGate()
        self._moved = asyncio.Event()

    async def start(self) -> None:
        """There is nothing to open."""

    async def close(self) -> None:
        self.kill()

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=not self._down, detail="killed" if self._down else "", version=self.version)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self._check("generate")
        self.requests.append(request)
        prompt = request.input_ids.tolist()
        done = next((n for n, token in enumerate(reversed(prompt)) if token not in self.letters), len(prompt))
        async with self._gate.passage():
            aborts, spans, count, finish = self._aborts, list[VersionSpan](), 0, None
            while finish is None:
                await self._step()
                ids = []
                if aborts != self._aborts:
                    finish = FinishReason.ABORT
                else:
                    ids = [self.end if done + count == self._length else self.letters[self.version]]
                    start = spans.pop().start if spans and spans[-1].version == self.version else count
                    count += 1
                    self.sampled += 1
                    spans.append(VersionSpan(self.version, start, count))
                    if ids[0] == self.end:
                        finish = FinishReason.STOP
                    elif count == request.sampling.max_tokens:
                        finish = FinishReason.LENGTH
                yield Chunk(
                    ids=ids,
                    logprobs=[scripted_logprob(len(prompt) + count - 1, token) for token in ids],
                    finish=finish,
                    stop_match=self.end if finish is FinishReason.STOP else None,
                    versions=tuple(spans) if finish and self._labels else (),
                )

    async def pause(self, mode: PauseMode) -> None:
        self._check("pause")
        self._gate.close()
        if mode == "abort":
            self._aborts += 1
            self._notify()
        else:
            await self._gate.drained()

    async def resume(self) -> None:
        self._check("resume")
        self._gate.open()

    async def set_version(self, version: int) -> None:
        self._check("set_version")
        self.version = version

    async def update_weights(self, weights: str, version: int) -> None:
        self._check("update_weights")
        if not weights.startswith("weights"):
            raise EngineRejected(f"no weights in {weights}")
        self.loaded.append(weights)
        self.version = version

    def hold(self, tokens: int) -> None:
        self.held.clear()
        self._hold = self.sampled + tokens
        self._notify()

    def release(self) -> None:
        self._hold = None
        self._notify()

    def kill(self) -> None:
        self._down = True
        self._notify()

    def restart(self, *, version: int = 0) -> None:
        """Restart as a new process does, without the weights that were loaded."""
        self._down, self.version = False, version
        self._gate.open()

    async def _step(self) -> None:
        await asyncio.sleep(0)
        aborts = self._aborts
        while self._hold is not None and self.sampled >= self._hold and aborts == self._aborts and not self._down:
            self.held.set()
            await self._moved.wait()
        if self._down:
            raise EngineUnavailable(f"engine {self.name!r} went down")

    def _check(self, operation: str) -> None:
        self.told.append(operation)
        if self._down:
            raise EngineUnavailable(f"engine {self.name!r} is down")
        if operation in self.fails:
            raise self.fails[operation]

    def _notify(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
