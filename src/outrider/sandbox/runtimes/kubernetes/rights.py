"""The rights that a node's account needs for its sandboxes, as rules of a Role. The Helm chart has the same rules."""

from __future__ import annotations

RULES: tuple[dict[str, tuple[str, ...]], ...] = (
    {"apiGroups": ("",), "resources": ("pods",), "verbs": ("create", "get", "list", "watch", "delete")},
    # A command in a pod is started by a GET request. Older servers require only `get` for it, newer servers both verbs.
    {"apiGroups": ("",), "resources": ("pods/exec",), "verbs": ("create", "get")},
)
PULL_RULES: tuple[dict[str, tuple[str, ...]], ...] = (
    {"apiGroups": ("apps",), "resources": ("daemonsets",), "verbs": ("create", "get", "delete")},
)
"""Further rights, which only `outrider image pull-ahead` needs."""
