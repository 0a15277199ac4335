"""A table of how Outrider uses each field of Harbor's `task.toml`. docs/datasets.md shows this table.

The module is pure data. Invariant: each field of the schema is in exactly one row, so no setting of a task is ignored
silently.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Use(StrEnum):
    """Outrider's use of a field.

    given: the value becomes part of the task.
    checked: a task is refused if Outrider does not support the value. The error names the field.
    unused: the field has no effect on sessions."""

    GIVEN = "given"
    CHECKED = "checked"
    UNUSED = "unused"


class FieldUse(NamedTuple):
    """A row of the table. `names` are the paths of fields, separated by spaces, and `how` is the text for the docs.

    One path may stand for several fields. The path of a list also stands for the list's elements. The path of a field
    of the task also stands for the same field of a step or of a verifier's environment."""

    names: str
    use: Use
    how: str

    @property
    def fields(self) -> list[str]:
        return self.names.split()


FIELD_USES: tuple[FieldUse, ...] = (
    FieldUse("task.name", Use.GIVEN, "the label `harbor`"),
    FieldUse(
        "schema_version task.version task.description task.authors.name task.authors.email task.keywords metadata"
        " source",
        Use.UNUSED,
        "words about the task",
    ),
    FieldUse("agent.timeout_sec", Use.GIVEN, "`limits.agent_seconds`, and `session_seconds`, if that is more"),
    FieldUse("agent.user verifier.user verifier.collect.user", Use.CHECKED, "root is the one user of a sandbox"),
    FieldUse(
        "environment.network_mode environment.allow_internet environment.allowed_hosts agent.network_mode"
        " agent.allowed_hosts verifier.network_mode verifier.allowed_hosts",
        Use.GIVEN,
        "[`runtime.network`](network.md), which the operator must allow. Harbor's default is a public network",
    ),
    FieldUse("environment.docker_image", Use.GIVEN, "`runtime.image`"),
    FieldUse(
        "environment.build_timeout_sec",
        Use.UNUSED,
        "no image is built in a session; `outrider image build` bounds each `RUN` by itself",
    ),
    FieldUse("environment.os", Use.CHECKED, '`"linux"`'),
    FieldUse(
        "environment.cpus environment.memory_mb environment.storage_mb environment.gpus",
        Use.GIVEN,
        "`runtime.resources`",
    ),
    FieldUse("environment.gpu_types", Use.CHECKED, "GPUs are not told apart"),
    FieldUse("environment.tpu", Use.CHECKED, "sandboxes have no TPUs"),
    FieldUse(
        "environment.mcp_servers.name environment.mcp_servers.transport environment.mcp_servers.url"
        " environment.mcp_servers.command environment.mcp_servers.args environment.mcp_servers.headers",
        Use.GIVEN,
        "[`harness.mcp_servers`](mcp-and-skills.md); none of a verifier's environment",
    ),
    FieldUse(
        "environment.skills_dir",
        Use.GIVEN,
        "[`harness.skills`](mcp-and-skills.md); none of a verifier's environment",
    ),
    FieldUse("environment.env", Use.GIVEN, "`runtime.env`"),
    FieldUse("environment.workdir", Use.GIVEN, "`runtime.workdir`"),
    FieldUse(
        "environment.healthcheck.command environment.healthcheck.interval_sec environment.healthcheck.timeout_sec"
        " environment.healthcheck.retries environment.healthcheck.start_period_sec"
        " environment.healthcheck.start_interval_sec",
        Use.GIVEN,
        "a [prepare step](tasks.md#prepare-steps); none of a verifier's environment, as in Harbor",
    ),
    FieldUse("verifier.timeout_sec", Use.GIVEN, "`evaluator.seconds`"),
    FieldUse("verifier.env", Use.GIVEN, "`evaluator.options.env`"),
    FieldUse(
        "verifier.environment_mode verifier.environment",
        Use.GIVEN,
        "`evaluator.carry` and [`evaluator.runtime`](#separate-verifiers)",
    ),
    FieldUse("verifier.collect.command verifier.collect.timeout_sec", Use.GIVEN, "`collect`"),
    FieldUse(
        "verifier.collect.service artifacts.service", Use.CHECKED, "there is no service beside the agent's sandbox"
    ),
    FieldUse("artifacts.source", Use.GIVEN, "`artifacts`, and `evaluator.carry` for a separate verifier"),
    FieldUse(
        "artifacts.exclude", Use.GIVEN, "`evaluator.options.without` for a separate verifier; kept artifacts are whole"
    ),
    FieldUse("artifacts.destination", Use.UNUSED, "artifacts are kept under their paths in the sandbox"),
    FieldUse("solution.env", Use.GIVEN, "variables of the solution"),
    FieldUse("multi_step_reward_strategy", Use.GIVEN, "`steps_reward`"),
    FieldUse("steps.name", Use.GIVEN, "the folder of the step"),
    FieldUse("steps.min_reward", Use.GIVEN, "`needs` of the step after it"),
)
