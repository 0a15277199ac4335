"""Answers a service's model calls with Tinker's sampling clients, and keeps Tinker's id of each sampled sequence.

A relay worker in a thread of the trainer's process receives the model calls. The trainer gives a sampling client for
each group. All calls of the group are sampled with this client, even after the trainer has made newer clients. Each new
client is a new policy version. The module needs `tinker` (0.38), not tinker-cookbook. Invariant: sampled tokens have
the version of the client that sampled them.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import tinker
import xxhash

from outrider.engines.base import Chunk, GenerateRequest, SamplingParams
from outrider.errors import EngineMisbehaved, EngineRejected, EngineUnavailable
from outrider.relay import FunctionEngine, Worker
from outrider.schemas import GroupView
from outrider.trainers.relay_thread import RelayThread
from outrider.trajectory import FinishReason, LogprobKind, VersionSpan

FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
UNKNOWN_TO_TINKER = {
    "min_p": 0.0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "constraint": None,
}
"""Sampling parameters that Tinker does not support, each with the only value that is accepted."""
REFUSALS = frozenset({400, 413, 422})
"""HTTP statuses of refused requests. Tinker would refuse such a request again."""

SamplingClient = Any
"""A `tinker.SamplingClient`, or another object with the same method `sample`."""


@dataclass(frozen=True)
class SampledSequence:
    """A sequence that Tinker sampled: its tokens, its id, and the number of prompt tokens that came from Tinker's
    cache."""

    ids: tuple[int, ...]
    sequence_id: str | None
    cached_tokens: int


class SampledSequences:
    """The sampled sequences of one session, by their prompts."""

    def __init__(self) -> None:
        self._by_prompt: dict[int, list[SampledSequence]] = {}

    def add(self, prompt: Sequence[int] | np.ndarray, sequence: SampledSequence) -> None:
        self._by_prompt.setdefault(_digest(prompt), []).append(sequence)

    def find(self, ids: Sequence[int], start: int, end: int) -> tuple[SampledSequence, int] | None:
        """Find the sequence that the row `ids` contains at `start`. Such a sequence was sampled for the prompt
        `ids[:start]`, and its tokens up to `end` are the next ids of the row. Returns the longest such sequence and the
        position where it ends in the row, or None."""
        best: tuple[SampledSequence, int] | None = None
        for sequence in self._by_prompt.get(_digest(ids[:start]), ()):
            stop = min(end, start + len(sequence.ids))
            fits = stop > start and tuple(ids[start:stop]) == sequence.ids[: stop - start]
            if fits and (best is None or stop > best[1]):
                best = sequence, stop
        return best


class SampledGroup:
    """A running group: its client, the client's policy version, and the sampled sequences by session id. `announced` is
    done once the ids of the group's sessions are known, or when the group ends before they are known."""

    def __init__(self, client: SamplingClient, version: int, by_session: dict[str, SampledGroup]) -> None:
        self.client = client
        self.version = version
        self.sessions: dict[str, SampledSequences] = {}
        self.announced: Future[None] = Future()
        self._by_session = by_session

    def announce(self, view: GroupView) -> None:
        """Record the ids of the group's sessions from `view`, the reply to the submission."""
        self.sessions = {session.id: SampledSequences() for session in view.sessions}
        self._by_session.update(dict.fromkeys(self.sessions, self))
        self.announced.set_result(None)

    def close(self) -> None:
        for session in self.sessions:
            del self._by_session[session]
        if not self.announced.done():
            self.announced.set_result(None)


class TinkerSampler:
    """A relay worker in the trainer's process, for the relay engine `relay` of the service at `url`. `version` is the
    newest policy version; the first client gets the next version.

    `open` makes at most one sampler for an engine. An engine divides its calls among its workers, so a second sampler
    would also get calls of groups that belong to the first sampler.
    """

    _open: ClassVar[dict[tuple[str, str], TinkerSampler]] = {}

    @classmethod
    def open(cls, url: str, token: str | None, relay: str, *, version: int) -> TinkerSampler:
        """Return this process's sampler for an engine. Call `close` once for each call of this method."""
        if (url, relay) not in cls._open:
            cls._open[url, relay] = cls(url, token, relay, version=version)
        sampler = cls._open[url, relay]
        sampler._users += 1
        return sampler

    def __init__(self, url: str, token: str | None, relay: str, *, version: int) -> None:
        self.version = version
        self._key = url, relay
        self._users = 0
        self._lock = threading.Lock()  # tinker-cookbook may run groups in several threads
        self._newest: SamplingClient | None = None
        self._versions: WeakKeyDictionary[SamplingClient, int] = WeakKeyDictionary()
        self._groups: set[SampledGroup] = set()
        self._by_session: dict[str, SampledGroup] = {}
        # SkyRL's implementation of the Tinker API reports log-probabilities from before the temperature. With the
        # cookbook's default temperature of 1, these are also the log-probabilities of the sampling distribution.
        self._engine = FunctionEngine(self._generate, logprob_kind=LogprobKind.RAW, version=version)
        self._thread = RelayThread(lambda: Worker(url, self._engine, engine=relay, token=token, name="tinker"))
        atexit.register(self._detach)

    async def attach(self) -> None:
        """Attach the worker to the service, unless it is attached. Returns when the service has accepted the worker.
        Raises the errors of `Worker.in_thread`."""
        await asyncio.to_thread(self._thread.attach)

    def close(self) -> None:
        """End one use of the sampler (see `open`). After the last use, and when the process exits, the worker is
        detached from the service."""
        self._users -= 1
        if not self._users:
            self._detach()

    def _detach(self) -> None:
        self._open.pop(self._key, None)
        self._thread.close()
        atexit.unregister(self._detach)

    @contextmanager
    def group(self, client: SamplingClient) -> Iterator[SampledGroup]:
        """Sample the calls of a group with `client`. The caller submits the group inside the block. A client that was
        not used before gets a new version."""
        with self._lock:
            if client not in self._versions:
                # Begin above the engine's version, because a worker with a lower version gets no calls. An operator may
                # have raised the engine's version.
                self.version = max(self.version, self._engine.version) + 1
                self._newest = client
                self._versions[client] = self.version
                if self._thread.worker is not None:
                    self._thread.worker.set_version(self.version)
            group = SampledGroup(client, self._versions[client], self._by_session)
        self._groups.add(group)
        try:
            yield group
        finally:
            self._groups.remove(group)
            group.close()

    async def _generate(self, request: GenerateRequest) -> Chunk:
        """Sample one reply. Raises EngineRejected for a request that Tinker refuses. Raises EngineUnavailable or
        EngineMisbehaved if Tinker fails."""
        params = sampling_params(request.sampling)
        group, sequences = await self._group_of(request.session_key)
        client = group.client if group is not None else self._newest
        if client is None:
            raise EngineUnavailable("the trainer has no sampling client yet")
        version = group.version if group is not None else self.version
        prompt = tinker.ModelInput.from_ints(request.input_ids.tolist())
        try:
            reply = await client.sample(prompt=prompt, num_samples=1, sampling_params=params)
        except tinker.TinkerError as error:
            refused = getattr(error, "status_code", None) in REFUSALS or getattr(error, "category", None) == "user"
            kind = EngineRejected if refused else EngineUnavailable
            raise kind(f"Tinker did not sample: {type(error).__name__}: {error}") from error
        [sampled] = reply.sequences
        ids = list(sampled.tokens)
        if sampled.logprobs is None or sampled.stop_reason not in FINISH:
            raise EngineMisbehaved(f"Tinker's reply has no log-probabilities, or ended with {sampled.stop_reason!r}")
        if sequences is not None:
            found = SampledSequence(tuple(ids), sampled.sequence_id, reply.prompt_cache_hit_tokens)
            sequences.add(request.input_ids, found)
        stopped = ids[-1:] if sampled.stop_reason == "stop" else []
        return Chunk(
            ids=ids,
            logprobs=list(sampled.logprobs),
            finish=FINISH[sampled.stop_reason],
            stop_match=stopped[0] if stopped and stopped[0] in request.sampling.stop_token_ids else None,
            versions=(VersionSpan(version, 0, len(ids)),) if ids else (),
            cached_tokens=reply.prompt_cache_hit_tokens,
        )

    async def _group_of(self, session_key: str) -> tuple[SampledGroup, SampledSequences] | tuple[None, None]:
        """Return a session's group and sequences, or None for both if the session belongs to another client of the
        service.

        If the session is unknown, first waits for missing replies to submissions, because a session's first call may
        arrive before the reply that names the session."""
        waiting = {asyncio.wrap_future(group.announced) for group in self._groups.copy() if not group.announced.done()}
        while True:
            session = session_key
            while session:  # the key of a session's calls is the session's id, a hyphen and a suffix
                session = session.rpartition("-")[0]
                if (group := self._by_session.get(session)) is not None:
                    return group, group.sessions[session]
            if not waiting:
                return None, None
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


def sampling_params(asked: SamplingParams) -> tinker.SamplingParams:
    """Convert sampling parameters to Tinker's class. Raises EngineRejected for parameters that Tinker does not
    support."""
    for name, neutral in UNKNOWN_TO_TINKER.items():
        if getattr(asked, name) != neutral:
            raise EngineRejected(f"Tinker does not support {name}", hint="leave it out of the agent's requests")
    if asked.stop and asked.stop_token_ids:
        raise EngineRejected(
            "Tinker takes stop strings or stop tokens, and the model's turns end with stop tokens",
            hint="leave stop strings out of the agent's requests",
        )
    return tinker.SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        stop=[*asked.stop, *asked.stop_token_ids],
    )


def _digest(ids: Sequence[int] | np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.asarray(ids, dtype="<i4").tobytes())
