"""The bridge to verl (0.9.1). `RemoteAgentLoop` is an agent loop that runs each trajectory as a session of an Outrider
service. For the V1 trainer, `OutriderAgentLoopManager` runs each prompt as a group of sessions.

    # agent_loop_config_path: a file with
    - name: outrider
      _target_: outrider.trainers.verl.RemoteAgentLoop

The manager also registers the advantage estimators of verl_advantages.py. The settings are in `rollout.custom.outrider`
(verl_rows.VerlSettings). With the setting `relay`, verl's own servers generate, and a Ray actor attaches them to the
service.

The service's address is the first of these that is set:

1. $OUTRIDER_URL
2. the address of the Ray actor that the setting `actor` names (see `start_service`)
3. the setting `url`

Invariant: a session that cannot be trained on raises an error and gives no sample.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
import torch
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

try:
    import transfer_queue as tq
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
    from verl.trainer.ppo.core_algos import register_adv_est
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ, apply_greedy_sampling_params
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict
    from verl.utils.tokenizer import get_processor_token_id
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
except ImportError as error:
    from outrider.environment import install_command

    raise ImportError(f"outrider.trainers.verl needs verl 0.9.1 ({install_command('verl')}): {error}") from error

from outrider.client.client import patiently
from outrider.client.pass_rate import evaluation_task
from outrider.engines.base import Chunk, GenerateRequest, SamplingParams
from outrider.environment import environment, variables
from outrider.errors import (
    ContextOverflow,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    InvalidField,
    OutriderError,
    ServiceError,
)
from outrider.relay import Worker
from outrider.trainers.pictures import image_in_grid
from outrider.trainers.relay_thread import RelayThread
from outrider.trainers.shared_client import run_group, shared_client
from outrider.trainers.shared_settings import group_of, refuse_min_usable
from outrider.trainers.trajectories import Trajectory
from outrider.trainers.verl_advantages import ESTIMATORS, check_loop, check_weights
from outrider.trainers.verl_rows import (
    SETTINGS,
    Terms,
    VerlSettings,
    columns_of,
    give_own_seed,
    verl_settings,
    verl_task,
)
from outrider.trajectory import FinishReason, SampleImage, VersionSpan

log = logging.getLogger("outrider.verl")

MODEL_PATH = "actor_rollout_ref.model.path"
START_SECONDS = 120.0
"""How long a service started by `start_service` may take to be ready, in seconds."""
READY = b"outrider is ready at "
"""The text that `outrider serve` prints before the service's address, at the beginning of a line."""
ABORTED = ("aborted", "abort")
ABORT_PAUSE = 1.0
"""How long to wait before an aborted generation is continued, in seconds, as in verl's own client. verl aborts
generations while its servers load weights."""
SENT = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
"""Sampling parameters that are sent even if their value is 0."""
SGLANG_NAMES = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class RowOutput(AgentLoopOutput):  # type: ignore[misc]  # verl has no types
    """An output with a reward for each response id, in the column `rm_scores`. Without this column, the V1 trainer
    would assign the score of a session's last output to the last ids of all outputs of the session. The V0 trainer does
    so even with this column."""

    token_rewards: list[float]

    def as_dict(self) -> dict[str, Any]:
        output: dict[str, Any] = super().as_dict()
        output["rm_scores"] = torch.tensor(output.pop("token_rewards"), dtype=torch.float32)
        return output


class RemoteAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """Runs each trajectory as a group of one session.

    With the V1 trainer, the setting `rows` must be "main", because the V1 trainer would count each row as a rollout.
    With the V0 trainer, a session must have exactly one row.
    """

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Run one session for `row`, a row of the dataset. Raises the session's error. Raises InvalidField if the
        session has several training rows."""
        settings = settings_of(self.config)
        number = row.get("session_id")  # only the V1 trainer numbers the sessions of a prompt
        if number is not None:
            check_loop(settings)
        terms = terms_of(self.config, sampling_params, self.processor)
        task = verl_task(settings, row, terms)
        give_own_seed(task, number, self.rollout_config.n)
        [trajectory] = await roll_out(settings, group_of(settings, task), terms, self.server_manager)
        outputs = await outputs_of(trajectory, settings, terms, self.processor, step=_step(row))
        if len(outputs) > 1:
            raise InvalidField(
                f"session {trajectory.session.id} has {len(outputs)} rows, and verl's V0 trainer takes one",
                field=f"{SETTINGS}.rows",
                hint=f"set {SETTINGS}.rows=main, or use the V1 trainer with OutriderAgentLoopManager",
            )
        return outputs[0]


class OutriderWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]  # verl has no types
    """verl's V1 worker, changed so that the trajectories of a prompt are one group of n sessions. The group is
    submitted and cancelled as a whole, and has one priority. Each session has its own seed."""

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        uid, validate = prompt["uid"], bool(trajectory["validate"])
        partition = "val" if validate else "train"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        status = "failure"
        try:
            await self._roll_out(prompt, dict(sampling_params), validate)
            status = "finished"
        except OutriderError as error:  # verl replaces a failed group, whatever the error is
            log.warning("the group of prompt %s failed: %s: %s", uid, error.code, error.message)
        # This error is a bug or a wrong setting. It is caught here, because verl would wait forever for a prompt
        # without a final status.
        except Exception:
            log.exception("the group of prompt %s failed", uid)
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})

    async def _roll_out(self, prompt: dict[str, Any], sampling: dict[str, Any], validate: bool) -> None:
        """Run the group of a prompt, and store its rows. If more sessions fail than the setting `complete` allows,
        stores no row and raises the error of the first failed session."""
        settings = settings_of(self.config)
        rollout = self.config.actor_rollout_ref.rollout
        prompt.pop("agent_name", None)  # removed, because this worker uses no named agent loop
        n = int(prompt.pop("__rollout_n__", rollout.val_kwargs.n if validate else rollout.n))
        if not prompt.pop("__do_sample__", True) and not validate:
            apply_greedy_sampling_params(sampling)
        terms = terms_of(self.config, sampling, self.processor)
        task = verl_task(settings, prompt, terms)
        group = group_of(settings, evaluation_task(task, "verl") if validate else task, n=n, evaluating=validate)
        outputs: dict[int, list[AgentLoopOutput]] = {}
        failures: list[OutriderError] = []
        for trajectory in await roll_out(settings, group, terms, self.llm_client):
            try:
                found = await outputs_of(trajectory, settings, terms, self.processor, step=_step(prompt))
                outputs[trajectory.session.sample_index] = found
            except OutriderError as error:
                failures.append(error)
        if failures and (settings.complete == "all" or not outputs):
            raise failures[0]
        for number, rows in outputs.items():
            await self._agent_loop_postprocess(rows, validate, session_id=number, **prompt)
            if not validate and self.config.algorithm.adv_estimator in ESTIMATORS:
                # Put the row's key into `uid`. Of the columns that the trainer passes to the estimators, only `uid` can
                # identify a row's session.
                keys = [f"{prompt['uid']}_{number}_{row}" for row in range(len(rows))]
                fields = list_of_dict_to_tensordict([{"uid": key} for key in keys])
                await tq.async_kv_batch_put(keys=keys, partition_id="train", fields=fields)


class OutriderAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]  # verl has no types
    """verl's manager of agent loops, but with `OutriderWorker`s. To use it, set
    `rollout.agent.agent_loop_manager_class` of the V1 trainer to this class."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        for name, estimator in ESTIMATORS.items():
            # The estimators are registered in this process, because this process also computes the advantages.
            register_adv_est(name)(estimator)
        # The settings are checked once here. Otherwise a wrong setting would raise an error in every rollout.
        settings = settings_of(self.config)
        check_weights(self.config, settings)
        if settings.complete == "all":
            refuse_min_usable(settings, self.config.actor_rollout_ref.rollout.n)
        self.agent_loop_workers_class = ray.remote(OutriderWorker)


def settings_of(config: Any) -> VerlSettings:
    """Read the bridge's settings from verl's whole configuration. Raises InvalidField for wrong settings."""
    custom = config.actor_rollout_ref.rollout.get("custom")
    return verl_settings(OmegaConf.to_container(custom, resolve=True) if OmegaConf.is_config(custom) else custom)


def terms_of(config: Any, sampling: Mapping[str, Any], processor: Any) -> Terms:
    rollout = config.actor_rollout_ref.rollout
    media = [get_processor_token_id(processor, kind) for kind in ("image", "video")] if processor is not None else []
    return Terms(
        prompt_length=int(rollout.prompt_length),
        response_length=int(rollout.response_length),
        logprobs=bool(rollout.calculate_log_probs),
        sampling=sampling,
        media_ids=frozenset(number for number in media if number is not None),
    )


async def roll_out(settings: VerlSettings, group: Mapping[str, Any], terms: Terms, llm_client: Any) -> list[Trajectory]:
    """Run a group and return its sessions. With the setting `relay`, verl's servers are attached to the service
    first."""
    settings = await with_address(settings)
    if settings.relay is not None:
        await attach_servers(llm_client, settings.url, settings.token, settings.relay)
    return await run_group(settings, group, logprobs=terms.logprobs, images=bool(terms.media_ids))


async def with_address(settings: VerlSettings) -> VerlSettings:
    """Return the settings with the URL and token from the Ray actor `settings.actor`. The settings are returned
    unchanged if `actor` is None or $OUTRIDER_URL is set. Raises InvalidField if the Ray job has no such actor."""
    if settings.actor is None or environment("OUTRIDER_URL"):
        return settings
    try:
        actor = ray.get_actor(settings.actor)
    except ValueError as error:
        raise InvalidField(
            f"{SETTINGS}.actor is {settings.actor!r}, and this Ray job has no such actor",
            field=f"{SETTINGS}.actor",
            hint="call outrider.trainers.verl.start_service before training, or set OUTRIDER_URL in"
            " ray_kwargs.ray_init.runtime_env.env_vars",
        ) from error
    url, token = await actor.address.remote()
    return settings.model_copy(update={"url": url, "token": token})


async def outputs_of(
    trajectory: Trajectory, settings: VerlSettings, terms: Terms, processor: Any, *, step: int
) -> list[AgentLoopOutput]:
    """Return verl's outputs of one session, one for each row. Raises the errors of `columns_of` and `pictures_of`."""
    found = columns_of(trajectory, settings, terms, step=step)
    for fields in found:
        if images := fields.pop("images"):
            pictures = await pictures_of(settings, images, processor)
            # The empty dictionary leaves the processor's settings unchanged, because the engine has read the images
            # with these settings.
            fields |= {"multi_modal_data": {"images": pictures}, "mm_processor_kwargs": {}}
    seconds = {"generate_sequences": trajectory.seconds, "compute_score": trajectory.result.seconds.eval}
    return [RowOutput(**fields, metrics=AgentLoopMetrics(**seconds)) for fields in found]


async def pictures_of(settings: VerlSettings, images: Sequence[SampleImage], processor: Any) -> list[Any]:
    """Return the images of a row as Pillow images, in the size that the engine read. verl's processor makes pixel
    values of them. Raises InvalidField if the processor's grid of patches differs from the engine's."""
    settings = await with_address(settings)
    async with shared_client(settings.url, settings.token) as shared:
        files = {
            digest: (await patiently(partial(shared.client.image, digest))).data
            for digest in {image.digest for image in images}
        }
    read = partial(image_in_grid, image_processor=processor.image_processor, trainer="verl", field=MODEL_PATH)
    return await asyncio.to_thread(lambda: [read(files[image.digest], image.grid).picture for image in images])


def _step(row: Mapping[str, Any]) -> int:
    """Return the trainer's step, or 0 for the V0 trainer, which does not pass the step."""
    return int(row.get("global_steps", 0))


class VerlGenerate:
    """The `generate` function of a relay worker. The function generates on verl's own servers through `client`, an
    LLMServerClient of verl. The client can be pickled, so this object can be pickled, too.

    If verl aborts a generation to load new weights, another request is sent after `abort_pause` seconds. The new
    request continues after the ids sampled so far. verl does not stream, so each request gives one chunk, whose tokens
    all have the same version.
    """

    def __init__(self, client: Any, *, abort_pause: float = ABORT_PAUSE) -> None:
        self._client = client
        self._abort_pause = abort_pause

    async def __call__(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Generate a reply, and yield its chunks.

        Raises ContextOverflow for a prompt that fills the context, and EngineRejected for a request with a constraint.
        Raises EngineUnavailable if verl's server fails, and EngineError if its reply has no log-probabilities."""
        prompt = [int(token) for token in request.input_ids]
        rollout = self._client.config.actor_rollout_ref.rollout
        context = int(rollout.max_model_len or rollout.prompt_length + rollout.response_length)
        if len(prompt) >= context:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens, and verl's servers take {context} with the reply"
            )
        most = min(request.sampling.max_tokens, context - len(prompt))
        params = _verl_sampling(request.sampling, rollout.name)
        ids: list[int] = []
        spans: list[VersionSpan] = []
        while True:
            output = await self._attempt(request.session_key, prompt + ids, {**params, "max_tokens": most - len(ids)})
            new = [int(token) for token in output.token_ids][: most - len(ids)]
            logprobs = [float(value) for value in output.log_probs or ()][: len(new)]
            if len(logprobs) != len(new):
                raise EngineError(
                    f"verl's server gave {len(logprobs)} log-probabilities for {len(new)} tokens",
                    hint="set actor_rollout_ref.rollout.calculate_log_probs=True",
                )
            version = output.extra_fields.get("global_steps")
            if new and version is not None:
                spans.append(VersionSpan(version=int(version), start=len(ids), end=len(ids) + len(new)))
            ids += new
            aborted = output.stop_reason in ABORTED
            if aborted and len(ids) < most:
                if new:
                    yield Chunk(ids=new, logprobs=logprobs)
                await asyncio.sleep(self._abort_pause)
                continue
            yield Chunk(
                ids=new,
                logprobs=logprobs,
                finish=FinishReason.LENGTH if len(ids) >= most else FinishReason.STOP,
                # If a server did not report its version, the spans do not cover all tokens and are left out.
                versions=tuple(spans) if sum(span.end - span.start for span in spans) == len(ids) else (),
                cached_tokens=output.extra_fields.get("num_cached_tokens"),
            )
            return

    async def _attempt(self, session: str, prompt: list[int], params: dict[str, Any]) -> Any:
        client = self._client
        # The client of verl's asynchronous trainers continues an aborted generation by itself, but does not report
        # where the abort was. So call the method of the client's base class instead. This method returns after an
        # abort.
        generate = LLMServerClient.generate if isinstance(client, FullyAsyncLLMServerClient) else type(client).generate
        try:
            return await generate(client, session, prompt_ids=prompt, sampling_params=params)
        except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise EngineUnavailable(f"verl's server failed: {reason[0][:500]}") from error


def _verl_sampling(sampling: SamplingParams, backend: str) -> dict[str, Any]:
    """Convert sampling parameters to the names of `backend`, vLLM or SGLang, because verl passes the parameters on
    unchanged. Optional parameters with a neutral value are left out, because not every backend has them. Raises
    EngineRejected for a constraint, because verl's servers have no structured output."""
    if sampling.constraint is not None:
        raise EngineRejected("verl's servers do not support structured output")
    fields = {**msgspec.structs.asdict(sampling), "stop": list(sampling.stop)}
    fields["stop_token_ids"] = list(sampling.stop_token_ids)
    del fields["max_tokens"]
    names = SGLANG_NAMES if backend == "sglang" else {}
    given = {name: value for name, value in fields.items() if value or (name in SENT and value is not None)}
    return {"logprobs": True} | {names.get(name, name): value for name, value in given.items()}


class RelayActor:
    """Keeps verl's servers attached to a service as the relay engine `engine`."""

    def __init__(self, url: str, token: str | None, engine: str, llm_client: Any) -> None:
        generate = VerlGenerate(llm_client)
        self._relay = RelayThread(lambda: Worker(url, generate, engine=engine, token=token, name="verl"))
        # If the servers cannot be attached, this raises an error. The actor then ends, and all calls to it fail.
        self._relay.attach()

    def attach(self) -> None:
        """Attach the servers again if the worker has ended. Returns when the service has accepted the new worker.
        Raises the errors of `Worker.in_thread`."""
        self._relay.attach()


async def attach_servers(llm_client: Any, url: str, token: str | None, engine: str) -> None:
    """Attach verl's servers to the service through an actor that the whole Ray job shares. The actor ends with the verl
    worker that made it, and the next rollout makes another actor. Raises EngineUnavailable if the servers cannot be
    attached."""
    actor = _RELAYS.get((url, engine))
    if actor is None:
        options = {"name": f"outrider-relay-{engine}", "num_cpus": 0, "get_if_exists": True}
        actor = _RELAYS[url, engine] = ray.remote(RelayActor).options(**options).remote(url, token, engine, llm_client)
    try:
        await actor.attach.remote()
    except ray.exceptions.RayError as error:
        if isinstance(error, ray.exceptions.RayActorError):
            _RELAYS.pop((url, engine), None)
        raise EngineUnavailable(
            f"verl's servers cannot be attached to {url}: {error}",
            hint="is its token in OUTRIDER_TOKEN, and can this node reach the address?",
        ) from error


_RELAYS: dict[tuple[str, str], Any] = {}
"""The relay actors by URL and engine. Ray ends an actor when the process that made it drops the last handle. No object
of verl lives long enough to hold the handle, so this variable holds it."""


class ServiceActor:
    """Runs `outrider serve` in a child process, which ends when the actor ends."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._token = secrets.token_urlsafe(32)
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-verl-")
        self._log = Path(self._folder.name) / "log"
        own = {
            "data": f"{self._folder.name}/data",
            "port": 0,
            "host": ray.util.get_node_ip_address(),
            # The service's connections are not encrypted, like Ray's own by default.
            "tls": {"insecure": True},
            # Tasks may use any plugin, because only the trainer has the service's token.
            "plugins": {"allow": ["*"]},
        }
        settings = {**own, **config, "token": self._token}
        env = {name: value for name, value in variables().items() if name != "OUTRIDER_URL"}
        for name, value in settings.items():
            env[f"OUTRIDER_{name.upper()}"] = value if isinstance(value, str) else json.dumps(value, default=str)
        command = [sys.executable, "-c", "import sys; from outrider.cli import main; sys.exit(main())", "serve"]
        # The shell waits until its standard input ends, and then ends the service. The input ends when this process
        # exits, even if the process is killed.
        watch = '"$@" < /dev/null & child=$!; read -r _; kill "$child"; wait "$child"'
        with self._log.open("wb") as log_file:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", watch, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=env,
            )
        self._url = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = threading.Timer(START_SECONDS, self._process.stdin.close)
        limit.start()
        try:
            for line in self._process.stdout:
                if line.startswith(READY):
                    return line.removeprefix(READY).decode().strip()
        finally:
            limit.cancel()
        raise ServiceError(
            "the service of the Ray actor did not start",
            log_tail=self._log.read_bytes()[-4096:].decode(errors="replace"),
            hint="start it by hand with the same settings: `outrider serve`",
        )

    def address(self) -> tuple[str, str]:
        """Return the service's URL and token."""
        return self._url, self._token

    def stop(self) -> None:
        """End the service, and wait until it has ended. Its data folder is removed, unless `config` names another
        folder."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def start_service(config: Mapping[str, Any], *, name: str = "outrider") -> Any:
    """Run a service in a Ray actor on this node. Agent loops of the same Ray job find the actor by `name`. `config` has
    the settings of `outrider serve`, such as model and engines.

    Returns the handle of the actor. When the handle is dropped, the actor and the service end. Raises ServiceError,
    with the end of the service's log, if the service does not start."""
    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(ServiceActor).options(name=name, num_cpus=0, scheduling_strategy=here).remote(dict(config))
    try:
        ray.get(actor.address.remote())
    except ray.exceptions.RayActorError as error:
        raise ServiceError(f"the Ray actor {name!r} did not start: {error}") from error
    return actor
