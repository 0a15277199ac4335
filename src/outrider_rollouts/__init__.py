"""The id `outrider-rollouts` of verifiers' taskset, harness and environment: verifiers imports the module of that name.
The module needs verifiers, and holds nothing of its own."""

from outrider.trainers.verifiers_plugin import OutriderEnv, OutriderHarness, OutriderTaskset

__all__ = ["OutriderEnv", "OutriderHarness", "OutriderTaskset"]
