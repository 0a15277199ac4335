"""The metrics of a service: their names (`FAMILIES`) and their current values (`ServiceMetrics.read`).

Most values are read from the service's components at the time of the request. `metrics_counts.py` keeps the counters,
and `metrics_text.py` writes the values as text. Invariants: `read` returns only values of the metrics in `FAMILIES`; no
client or agent can choose a label value, and a metric has a limited number of values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from outrider.counts import OTHER, SECONDS, CallFailures, Distribution, NodeCounts, SandboxCounts
from outrider.errors import FailingChore, known_codes
from outrider.lifecycle import SessionState
from outrider.plugins import BUILTINS
from outrider.schemas import EngineStatus, NodeStats, PolicyStatus
from outrider.service.metrics_counts import (
    TURNS,
    VERSIONS,
    EngineCounts,
    ServiceCounts,
)
from outrider.service.metrics_rates import Totals
from outrider.service.placing import NodePlacement
from outrider.sessions.attempt import Node
from outrider.store.store import Store

MIB = 1 << 20
LANES = ("init", "ready", "run", "eval", "grading")
RUNTIMES = (*BUILTINS["runtime"], OTHER)

Labels = tuple[str, ...]
"""The names of a metric's labels, or the values of these labels in the same order."""


class Family(NamedTuple):
    """A metric: its name without `_total`, its kind, its description, and the names of its labels. `bounds` are the
    bucket bounds of a histogram."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Labels = ()
    bounds: tuple[float, ...] = SECONDS


FAMILIES = (
    # sessions and groups
    Family("outrider_sessions", "gauge", "Stored sessions by state.", ("state",)),
    Family("outrider_sessions_ended", "counter", "Sessions that are done, by stop reason.", ("reason",)),
    Family(
        "outrider_session_errors",
        "counter",
        "Sessions that ended with an error, by the boundary and the code of the error.",
        ("boundary", "code"),
    ),
    Family(
        "outrider_failed_attempts",
        "counter",
        "Attempts that failed and after which the session was queued again, by the error.",
        ("boundary", "code"),
    ),
    Family(
        "outrider_session_stage_seconds",
        "counter",
        "Seconds of the sessions that are done, by stage. Waits are stages of their own.",
        ("stage",),
    ),
    Family(
        "outrider_session_model_seconds",
        "counter",
        "Seconds in which at least one model call was under way, of the sessions that are done.",
    ),
    Family(
        "outrider_session_tool_seconds",
        "counter",
        "Seconds of runs in which no model call was under way (tools and the agent itself), of the sessions that are"
        " done.",
    ),
    Family("outrider_session_turns", "histogram", "Turns of each session that is done.", (), TURNS),
    Family(
        "outrider_session_tokens",
        "counter",
        "Sampled tokens of the sessions that are done, by what training does with them: trained, masked or dropped.",
        ("training",),
    ),
    Family(
        "outrider_session_unsure_tokens",
        "counter",
        "Sampled tokens of the sessions that are done whose branch has the kind `unsure`.",
    ),
    Family("outrider_samples", "counter", "Training rows of the sessions that are done."),
    Family(
        "outrider_groups_done",
        "counter",
        "Groups that are done, by the spread of their rewards: zero, some, or unknown (fewer than two rewards, or"
        " sessions that ended before the service's start).",
        ("reward_spread",),
    ),
    Family(
        "outrider_trained_sessions",
        "counter",
        "Sessions that are done and have tokens to train on, by the number of policy versions that sampled their"
        " tokens: one or several.",
        ("versions",),
    ),
    Family(
        "outrider_delivered_staleness_versions",
        "histogram",
        "For each session with tokens to train on, when its group is delivered: the number of policy versions since its"
        " oldest token.",
        (),
        VERSIONS,
    ),
    Family("outrider_first_prompt_tokens", "counter", "Tokens of the first prompt of each attempt."),
    Family(
        "outrider_first_prompt_shared_tokens",
        "counter",
        "Tokens of first prompts with which the first prompt of the group's first session begins, too.",
    ),
    # queue, delivery and store
    Family("outrider_queue_oldest_seconds", "gauge", "Age of the oldest session that may be started; 0 without one."),
    Family("outrider_queue_limit_sessions", "gauge", "The setting queue.sessions: new groups are refused beyond it."),
    Family("outrider_callbacks", "gauge", "Callbacks in the outbox: pending or given_up.", ("state",)),
    Family("outrider_stored_bytes", "gauge", "Size of all finished groups, without images."),
    Family(
        "outrider_store_transaction_seconds",
        "histogram",
        "Seconds of each transaction that writes, from its begin to the end of its commit.",
    ),
    # model calls
    Family(
        "outrider_model_calls",
        "counter",
        "Model calls whose turn is stored, by the model (policy or frozen) and the reason why the reply ended.",
        ("model", "finish"),
    ),
    Family(
        "outrider_model_call_failures",
        "counter",
        "Model calls that the gateway answered with an error, by dialect and code.",
        ("dialect", "code"),
    ),
    Family(
        "outrider_model_call_seconds",
        "histogram",
        "Seconds from the request to the end of the reply, by dialect.",
        ("dialect",),
    ),
    Family(
        "outrider_model_call_first_token_seconds",
        "histogram",
        "Seconds from the request to the first sampled token, by dialect.",
        ("dialect",),
    ),
    Family("outrider_sampled_tokens", "counter", "Sampled tokens of the stored turns.", ("model",)),
    Family("outrider_forks", "counter", "Turns of the policy that could not append, by cause.", ("cause",)),
    Family("outrider_drift_tokens", "counter", "Ids for which the engine reported others than were recorded."),
    Family("outrider_malformed_tool_calls", "counter", "Tool calls of the policy that cannot be parsed."),
    # engines and policy
    Family("outrider_engine_up", "gauge", "1 if the engine serves, 0 if it is kept out.", ("engine",)),
    Family("outrider_engine_suspect", "gauge", "1 while the engine is suspect after an invalid reply.", ("engine",)),
    Family("outrider_engine_in_flight", "gauge", "Generations in flight on the engine.", ("engine",)),
    Family("outrider_engine_sessions", "gauge", "Sessions that stay with the engine.", ("engine",)),
    Family("outrider_engine_assigned_tokens", "gauge", "Tokens of the contexts of the engine's sessions.", ("engine",)),
    Family("outrider_engine_policy_version", "gauge", "The engine's policy version, as last read.", ("engine",)),
    Family("outrider_engine_generated_tokens", "counter", "Tokens that the engine has sent.", ("engine",)),
    Family("outrider_engine_failures", "counter", "Failures of the engine.", ("engine",)),
    Family("outrider_engine_invalid_replies", "counter", "Replies of the engine that were impossible.", ("engine",)),
    Family("outrider_engine_calls", "counter", "Model calls whose reply the engine has made.", ("engine",)),
    Family(
        "outrider_engine_call_seconds", "counter", "Seconds of the engine's calls, from request to end.", ("engine",)
    ),
    Family("outrider_engine_prompt_tokens", "counter", "Tokens of the prompts of the engine's calls.", ("engine",)),
    Family(
        "outrider_engine_reported_prompt_tokens",
        "counter",
        "Tokens of the prompts for which the engine has reported how many tokens were cached.",
        ("engine",),
    ),
    Family(
        "outrider_engine_cached_prompt_tokens",
        "counter",
        "Prompt tokens that were in the engine's prefix cache.",
        ("engine",),
    ),
    Family("outrider_policy_version", "gauge", "The policy's version."),
    Family("outrider_policy_paused", "gauge", "1 while the policy is paused."),
    # nodes
    Family("outrider_node_sessions", "gauge", "Sessions that run on the node.", ("node",)),
    Family("outrider_node_capacity_sessions", "gauge", "Sessions that the node may run.", ("node",)),
    Family("outrider_node_drained", "gauge", "1 if the node gets no new sessions.", ("node",)),
    Family("outrider_lane_slots", "gauge", "Slots of the lane.", ("node", "lane")),
    Family("outrider_lane_in_use", "gauge", "Slots of the lane in use.", ("node", "lane")),
    Family("outrider_lane_waiting", "gauge", "Sessions that wait for a slot of the lane.", ("node", "lane")),
    Family("outrider_lane_served", "counter", "Slots of the lane given out.", ("node", "lane")),
    Family("outrider_lane_wait_seconds", "counter", "Seconds of waiting for slots of the lane.", ("node", "lane")),
    Family("outrider_node_cpus", "gauge", "Processors for sandboxes on the node's machine.", ("node",)),
    Family("outrider_node_reserved_cpus", "gauge", "Processors set aside for sessions.", ("node",)),
    Family("outrider_node_memory_bytes", "gauge", "Memory for sandboxes on the node's machine.", ("node",)),
    Family("outrider_node_reserved_memory_bytes", "gauge", "Memory set aside for sessions.", ("node",)),
    Family("outrider_node_gpus", "gauge", "GPUs for sandboxes on the node's machine.", ("node",)),
    Family("outrider_node_reserved_gpus", "gauge", "GPUs set aside for sessions.", ("node",)),
    Family("outrider_node_resource_waiting", "gauge", "Sessions that wait for processors, memory or GPUs.", ("node",)),
    Family(
        "outrider_node_resource_wait_seconds",
        "counter",
        "Seconds of waiting for processors, memory or GPUs.",
        ("node",),
    ),
    Family("outrider_node_stalls", "counter", "Stalls of the node's event loop beyond 50 ms.", ("node",)),
    Family("outrider_node_stall_seconds", "counter", "Seconds of stalls of the node's event loop.", ("node",)),
    Family("outrider_warm_sandboxes", "gauge", "Sandboxes that are ready ahead of time.", ("node",)),
    Family("outrider_warm_sandboxes_taken", "counter", "Sessions that got a warm sandbox.", ("node",)),
    Family("outrider_warm_sandbox_misses", "counter", "Sessions that found no warm sandbox.", ("node",)),
    # sandboxes
    Family(
        "outrider_sandbox_start_seconds",
        "histogram",
        "Seconds of each start of a sandbox, prepare steps included, by runtime.",
        ("runtime",),
    ),
    Family("outrider_sandbox_start_failures", "counter", "Starts of sandboxes that failed.", ("runtime",)),
    # the service itself
    Family("outrider_failing_chores", "gauge", "Background work that fails now (see GET /v1/status)."),
    Family("outrider_info", "gauge", "1; the label has the version of the service.", ("version",)),
)
"""All metrics, in the order of docs/metrics.md. In the output, counters have the suffix `_total`."""


class Value(NamedTuple):
    """One value of a metric. `family` is the name of the metric, and `labels` are the values of its labels."""

    family: str
    labels: Labels
    value: float | Distribution


@dataclass(frozen=True, kw_only=True)
class MetricSources:
    """The components of a service from which the metrics are read. `call_failures` counts the failed calls of the
    service's own gateway. `engines`, `policy` and `failing` return the current status."""

    store: Store
    counts: ServiceCounts
    places: NodePlacement
    call_failures: CallFailures
    engines: Callable[[], Sequence[EngineStatus]]
    policy: Callable[[], PolicyStatus]
    failing: Callable[[], Sequence[FailingChore]]
    queue_limit: int
    version: str


class ServiceMetrics:
    """Reads the metrics of a service. At most `CountLimits.named` nodes and engines have their own values. All others
    are added up."""

    def __init__(self, sources: MetricSources) -> None:
        self._sources = sources
        self._left = NodeCounts()
        """The counts of nodes that have left the service."""

    def note_departure(self, node: Node) -> None:
        """Keep the counts of a node that leaves, because counters must never decrease."""
        self._left = self._left.plus(node.counts())

    def totals(self) -> Totals:
        counts = self._sources.counts
        return Totals(
            sessions_done=counts.done_sessions,
            sessions_failed=counts.failed_sessions,
            groups_done=sum(counts.groups.values()),
            calls=sum(counts.calls["policy"].values()) + sum(counts.calls["frozen"].values()),
            calls_failed=sum(number for codes in self._all_counts().failed_calls.values() for number in codes.values()),
            tokens_sampled=sum(counts.sampled_tokens.values()),
        )

    async def read(self) -> list[Value]:
        """Return the current values. Raises ServiceError if the store fails."""
        sources, store = self._sources, self._sources.store
        states = await store.counts()
        backlog = await store.backlog()
        oldest = backlog.oldest_waiting
        policy = sources.policy()
        return [
            *(Value("outrider_sessions", (state.value,), states[state]) for state in SessionState),
            Value("outrider_queue_oldest_seconds", (), 0.0 if oldest is None else max(0.0, time.time() - oldest)),
            Value("outrider_queue_limit_sessions", (), sources.queue_limit),
            Value("outrider_callbacks", ("pending",), backlog.pending_callbacks),
            Value("outrider_callbacks", ("given_up",), backlog.given_up_callbacks),
            Value("outrider_stored_bytes", (), backlog.stored_bytes),
            Value("outrider_store_transaction_seconds", (), store.commit_seconds()),
            *self._sessions(),
            *self._calls(),
            *self._engines(),
            Value("outrider_policy_version", (), policy.version),
            Value("outrider_policy_paused", (), policy.paused is not None),
            *self._nodes(),
            *self._counted_by_nodes(),
            Value("outrider_failing_chores", (), len(sources.failing())),
            Value("outrider_info", (sources.version,), 1),
        ]

    def _sessions(self) -> Iterator[Value]:
        counts = self._sources.counts
        for reason, number in counts.ended.items():
            yield Value("outrider_sessions_ended", (reason.value,), number)
        for family, errors in (
            ("outrider_session_errors", counts.errors),
            ("outrider_failed_attempts", counts.failed_attempts),
        ):
            # Every error code has a count from the beginning, even 0, because `rate` and `increase` of Prometheus
            # ignore the first value of a series.
            zeros = {(boundary, code): 0 for code, boundary in known_codes().items()}
            for (boundary, code), number in (zeros | errors).items():
                yield Value(family, (boundary.value, code), number)
        for stage, seconds in counts.stage_seconds.items():
            yield Value("outrider_session_stage_seconds", (stage,), seconds)
        yield Value("outrider_session_model_seconds", (), counts.model_seconds)
        yield Value("outrider_session_tool_seconds", (), counts.tool_seconds)
        yield Value("outrider_session_turns", (), counts.turns.read())
        yield Value("outrider_session_tokens", ("trained",), counts.trained_tokens)
        yield Value("outrider_session_tokens", ("masked",), counts.masked_tokens)
        yield Value("outrider_session_tokens", ("dropped",), counts.dropped_tokens)
        yield Value("outrider_session_unsure_tokens", (), counts.unsure_tokens)
        yield Value("outrider_samples", (), counts.samples)
        for spread, number in counts.groups.items():
            yield Value("outrider_groups_done", (spread,), number)
        for versions, number in counts.trained_sessions.items():
            yield Value("outrider_trained_sessions", (versions,), number)
        yield Value("outrider_delivered_staleness_versions", (), counts.staleness.read())
        yield Value("outrider_first_prompt_tokens", (), counts.first_prompt_tokens)
        yield Value("outrider_first_prompt_shared_tokens", (), counts.shared_prompt_tokens)

    def _calls(self) -> Iterator[Value]:
        counts = self._sources.counts
        for model, finished in counts.calls.items():
            yield Value("outrider_sampled_tokens", (model,), counts.sampled_tokens[model])
            for finish, number in finished.items():
                yield Value("outrider_model_calls", (model, finish.value), number)
        for name, dialect in counts.dialects.items():
            yield Value("outrider_model_call_seconds", (name,), dialect.seconds.read())
            yield Value("outrider_model_call_first_token_seconds", (name,), dialect.first_token.read())
        for cause, number in counts.forks.items():
            yield Value("outrider_forks", (cause.value,), number)
        yield Value("outrider_drift_tokens", (), counts.drift_tokens)
        yield Value("outrider_malformed_tool_calls", (), counts.malformed_calls)

    def _engines(self) -> Iterator[Value]:
        counts, statuses = self._sources.counts, self._sources.engines()
        named = {engine.name for engine in statuses[: counts.limits.named]}
        yield from _added_up(
            value
            for engine in statuses
            for value in _engine_values(engine, engine.name if engine.name in named else OTHER)
        )
        # The counts of engines that were removed are added to the value of OTHER.
        yield from _added_up(
            value
            for name, engine in counts.engines.items()
            for value in _counted_engine(engine, name if name in named else OTHER)
        )

    def _nodes(self) -> list[Value]:
        nodes, named = self._sources.places.stats(), self._sources.counts.limits.named
        return _added_up(
            value
            for number, node in enumerate(nodes)
            for value in _node_values(node, node.name if number < named else OTHER)
        )

    def _all_counts(self) -> NodeCounts:
        found = self._left.plus(NodeCounts(failed_calls=self._sources.call_failures.read()))
        for node in self._sources.places.nodes():
            found = found.plus(node.counts())
        return found

    def _counted_by_nodes(self) -> Iterator[Value]:
        counts, codes, dialects = self._all_counts(), known_codes(), self._sources.counts.dialects
        # A node on another machine may report any names. So unknown dialects, codes and runtimes are counted together.
        failed: dict[Labels, int] = {(dialect, "engine_unavailable"): 0 for dialect in dialects}
        for dialect, of_dialect in counts.failed_calls.items():
            for code, number in of_dialect.items():
                known: Labels = (dialect if dialect in dialects else OTHER, code if code in codes else OTHER)
                failed[known] = failed.get(known, 0) + number
        for labels, number in failed.items():
            yield Value("outrider_model_call_failures", labels, number)
        sandboxes = dict.fromkeys(RUNTIMES, SandboxCounts())
        for runtime, of_runtime in counts.sandboxes.items():
            name = runtime if runtime in sandboxes else OTHER
            sandboxes[name] = sandboxes[name].plus(of_runtime)
        for runtime, of_runtime in sandboxes.items():
            yield Value("outrider_sandbox_start_seconds", (runtime,), of_runtime.started)
            yield Value("outrider_sandbox_start_failures", (runtime,), of_runtime.failed)


def _engine_values(engine: EngineStatus, name: str) -> Iterator[Value]:
    for family, value in (
        ("outrider_engine_up", engine.ok),
        ("outrider_engine_suspect", engine.suspect is not None),
        ("outrider_engine_in_flight", engine.in_flight),
        ("outrider_engine_sessions", engine.sessions),
        ("outrider_engine_assigned_tokens", engine.assigned_tokens),
        ("outrider_engine_generated_tokens", engine.generated_tokens),
        ("outrider_engine_failures", engine.failures),
        ("outrider_engine_invalid_replies", engine.misbehaved),
    ):
        yield Value(family, (name,), value)
    if name != OTHER:
        yield Value("outrider_engine_policy_version", (name,), engine.version)


def _counted_engine(engine: EngineCounts, name: str) -> Iterator[Value]:
    yield Value("outrider_engine_calls", (name,), engine.calls)
    yield Value("outrider_engine_call_seconds", (name,), engine.seconds)
    yield Value("outrider_engine_prompt_tokens", (name,), engine.prompt_tokens)
    yield Value("outrider_engine_reported_prompt_tokens", (name,), engine.reported_tokens)
    yield Value("outrider_engine_cached_prompt_tokens", (name,), engine.cached_tokens)


def _node_values(node: NodeStats, name: str) -> Iterator[Value]:
    has = node.resources
    for family, value in (
        ("outrider_node_sessions", node.sessions),
        ("outrider_node_capacity_sessions", node.capacity),
        ("outrider_node_drained", node.drained),
        ("outrider_node_cpus", has.cpus),
        ("outrider_node_reserved_cpus", has.cpus_set_aside),
        ("outrider_node_memory_bytes", has.memory_mb * MIB),
        ("outrider_node_reserved_memory_bytes", has.memory_mb_set_aside * MIB),
        ("outrider_node_gpus", has.gpus),
        ("outrider_node_reserved_gpus", has.gpus_set_aside),
        ("outrider_node_resource_waiting", has.waiting),
        ("outrider_node_resource_wait_seconds", has.waited_seconds),
        ("outrider_node_stalls", node.stalls.count),
        ("outrider_node_stall_seconds", node.stalls.total),
        ("outrider_warm_sandboxes", node.warm.ready),
        ("outrider_warm_sandboxes_taken", node.warm.taken),
        ("outrider_warm_sandbox_misses", node.warm.misses),
    ):
        yield Value(family, (name,), value)
    for lane in node.lanes:
        labels = name, lane.name if lane.name in LANES else OTHER
        yield Value("outrider_lane_slots", labels, lane.size)
        yield Value("outrider_lane_in_use", labels, lane.in_use)
        yield Value("outrider_lane_waiting", labels, lane.waiting)
        yield Value("outrider_lane_served", labels, lane.served)
        yield Value("outrider_lane_wait_seconds", labels, lane.waited_seconds)


def _added_up(values: Iterable[Value]) -> list[Value]:
    """Add up the values that have the same family and labels."""
    found: dict[tuple[str, Labels], float] = {}
    for family, labels, value in values:
        assert not isinstance(value, Distribution)
        found[family, labels] = found.get((family, labels), 0) + value
    return [Value(family, labels, value) for (family, labels), value in found.items()]
