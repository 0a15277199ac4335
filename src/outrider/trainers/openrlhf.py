"""The bridge to OpenRLHF: an agent executor that runs each sample as a session of an Outrider service.

The file in `--train.agent_func_path` has two lines:

    from outrider.trainers.openrlhf import agent_executor
    AgentExecutor = agent_executor()

OpenRLHF calls `execute` in its rollout actors, once for each sample of a prompt, and takes one row from each call
(`openrlhf.trainer.ppo_utils.samples_generator`, 0.11). With the setting `relay`, the actors' vLLM engines generate for
the service. Importing this module imports neither OpenRLHF nor vLLM. Invariants:

- The row has the tokens that the engine sampled, with a mask and log-probabilities of the same length.
- `execute` raises an error for a session that cannot be trained on.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from outrider.engines.base import Chunk, GenerateRequest
from outrider.errors import EngineError, EngineRejected, EngineUnavailable, InvalidField
from outrider.relay import FunctionEngine, Worker
from outrider.spec import Name
from outrider.trainers.exports import spans_of
from outrider.trainers.relay_thread import RelayThread
from outrider.trainers.shared_client import run_group
from outrider.trainers.shared_settings import BridgeSettings, group_of, read_settings, refuse_images, task_for
from outrider.trainers.trajectories import TrainingRow, Trajectory, chosen_metrics
from outrider.trajectory import BranchKind, FinishReason, LogprobKind

VARIABLE = "OUTRIDER_OPENRLHF"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "repetition_penalty", "stop")
"""The fields that are read from `execute`'s argument `sampling_params`, an object of vLLM's class SamplingParams."""
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class OpenRLHFSettings(BridgeSettings):
    """The settings that all bridges share, and `relay`: the name of the service's relay engine. OpenRLHF's own vLLM
    engines answer the calls to the relay engine. `relay` is None if the service has its own engines.

    A call of `execute` returns a single row. So with `rows="all"`, the default, a session with several training rows is
    an error. With `rows="main"`, only the main conversation's row is returned. The other rows are left out and counted.
    """

    relay: Name | None = None


class Executor:
    """The agent executor, without its base class `openrlhf.utils.agent.AgentExecutorBase`. This module must not import
    OpenRLHF, so the function `agent_executor` adds the base class."""

    def __init__(self, settings: OpenRLHFSettings) -> None:
        self._settings = settings
        self._attaching = asyncio.Lock()
        self._relay: RelayThread | None = None

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Run one session and return OpenRLHF's response. `label` may be a JSON object with the columns of the dataset
        row, including the task.

        Raises the session's error. Raises InvalidField if the session has several training rows and the setting `rows`
        is "all". Any error ends OpenRLHF's training. OpenRLHF offers no way to report only a failed sample."""
        refuse_images(images, "the prompt", field="images")
        cap = self._settings.max_row_tokens
        settings = self._settings.model_copy(update={"max_row_tokens": min(cap, max_length) if cap else max_length})
        sampling = {name: getattr(sampling_params, name, None) for name in SAMPLING}
        wants_logprobs = sampling_params.logprobs is not None
        task = task_for(settings, _columns(prompt, label), prompt=prompt, sampling=sampling, labels={})
        if settings.relay is not None:
            await self._attach(llm_engine, settings.relay, wants_logprobs)
        # Even if the setting `rows` is "main", request all rows, because the rows that are left out are counted.
        every = settings.model_copy(update={"rows": "all"})
        [trajectory] = await run_group(every, group_of(settings, task), logprobs=wants_logprobs)
        if trajectory.error is not None:
            raise trajectory.error
        row, left_out = _row_of(trajectory, settings)
        return {
            "prompt": prompt,
            "label": label,
            "images": images,
            "mm_train_inputs": None,
            "observation_tokens": row.ids,
            "action_ranges": [(span.start, span.end) for span in spans_of(row.mask) if span.trained],
            "rollout_log_probs": row.logprobs if wants_logprobs else None,
            "reward": row.reward,
            "scores": row.reward,
            "truncated": trajectory.truncated,
            # OpenRLHF makes a column from each key of `extra_logs`. So every row must have the same keys, and every
            # value must be a number.
            "extra_logs": {
                "outrider_turns": float(trajectory.result.turns),
                "outrider_agent_seconds": trajectory.seconds,
                "outrider_rows_left_out": float(len(left_out)),
                "outrider_tokens_left_out": float(sum(sum(other.mask) for other in left_out)),
                "outrider_cut_tokens": float(row.cut),
                "outrider_version": float(row.sample.min_version),
                **chosen_metrics(trajectory, settings),
            },
        }

    def close(self) -> None:
        """Detach OpenRLHF's engine from the service. This also happens when the process exits."""
        if self._relay is not None:
            self._relay.close()

    async def _attach(self, llm_engine: Any, relay: str, corrected: bool) -> None:
        """Attach the actor's vLLM engine to the service, unless it is already attached. Raises the errors of
        `Worker.in_thread`."""
        async with self._attaching:
            if self._relay is None:
                # With OpenRLHF's off-policy correction, vLLM reports the log-probabilities of the sampling
                # distribution. Otherwise vLLM reports raw log-probabilities.
                kind = LogprobKind.SAMPLING if corrected else LogprobKind.RAW
                engine = FunctionEngine(EngineGenerate(llm_engine, asyncio.get_running_loop()), logprob_kind=kind)
                at, token = self._settings.url, self._settings.token
                self._relay = RelayThread(lambda: Worker(at, engine, engine=relay, token=token, name="openrlhf"))
                atexit.register(self._relay.close)
            await asyncio.to_thread(self._relay.attach)


class EngineGenerate:
    """The `generate` function of a relay worker. It generates with `llm_engine`, OpenRLHF's vLLM engine, which runs on
    the event loop `loop`."""

    def __init__(self, llm_engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._llm_engine = llm_engine
        self._loop = loop

    async def __call__(self, request: GenerateRequest) -> Chunk:
        asked = request.sampling
        if asked.constraint is not None:
            raise EngineRejected("OpenRLHF's engines do not support structured output")
        fields = msgspec.structs.asdict(asked)  # vLLM's class SamplingParams has the same field names
        del fields["constraint"]
        fields |= {"stop": list(asked.stop), "stop_token_ids": list(asked.stop_token_ids)}
        fields |= {"logit_bias": asked.logit_bias or None, "logprobs": 0}
        params = importlib.import_module("vllm").SamplingParams(**fields)
        work = self._llm_engine.generate(request.input_ids.tolist(), params)
        output = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        reply = output.outputs[0]
        if reply.finish_reason not in FINISH:
            raise EngineUnavailable(f"OpenRLHF's vLLM ended a generation with {reply.finish_reason!r}")
        ids = list(reply.token_ids)
        return Chunk(
            ids=ids,
            logprobs=[given[token].logprob for given, token in zip(reply.logprobs, ids, strict=True)],
            finish=FINISH[reply.finish_reason],
            stop_match=reply.stop_reason,
        )


def agent_executor(settings: Mapping[str, Any] | None = None) -> type:
    """Return the class that OpenRLHF expects under the name AgentExecutor. Its settings are `settings`, overridden by
    $OUTRIDER_OPENRLHF. Raises InvalidField for wrong settings, and ImportError if OpenRLHF is not installed."""
    checked = read_settings(OpenRLHFSettings, settings, source="agent_executor()", variable=VARIABLE)
    base: type = importlib.import_module("openrlhf.utils.agent").AgentExecutorBase

    def init(self: Executor) -> None:
        Executor.__init__(self, checked)

    return type("AgentExecutor", (Executor, base), {"__init__": init, "__doc__": Executor.__doc__})


def _row_of(trajectory: Trajectory, settings: OpenRLHFSettings) -> tuple[TrainingRow, list[TrainingRow]]:
    """Return the row to train on, and the session's other rows. Raises InvalidField if the setting `rows` is "all" and
    the session has several training rows. Raises EngineError if `rows` is "main" and the main conversation has no token
    to train on."""
    rows = trajectory.rows
    if settings.rows == "all":
        if len(rows) > 1:
            raise InvalidField(
                f"session {trajectory.session.id} has {len(rows)} rows that train, and OpenRLHF takes one from a call",
                field="rows",
                hint="set rows to main in the bridge's settings, to train the main conversation's row only, or mask the"
                " other kinds of branches in the task",
            )
        return rows[0], []
    chosen = next((row for row in rows if row.sample.kind is BranchKind.MAIN), None)
    if chosen is None:
        raise EngineError(
            f"session {trajectory.session.id} has no token to train on in its main conversation",
            hint=f"see `outrider show {trajectory.session.id}`",
        )
    return chosen, [row for row in rows if row is not chosen]


def _columns(prompt: str, label: Any) -> dict[str, Any]:
    given = label
    if isinstance(label, str) and label.lstrip().startswith("{"):
        with suppress(json.JSONDecodeError):  # the label may be plain text that begins with a brace
            given = json.loads(label)
    return {"prompt": prompt, "label": label, **(given if isinstance(given, Mapping) else {})}
