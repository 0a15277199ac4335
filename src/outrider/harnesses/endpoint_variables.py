"""The environment variables of a session's model endpoint, under the names that the vendors' programs read.

Invariant: no task can set these variables.
"""

from __future__ import annotations

from outrider.harnesses.base import ModelEndpoint


def endpoint_environment(endpoint: ModelEndpoint, instruction: str) -> dict[str, str]:
    """Return the variables from which agent programs of all vendors read the endpoint and the instruction."""
    base, key = endpoint.base_url, endpoint.api_key
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "GOOGLE_GEMINI_BASE_URL": base,
        "GEMINI_API_KEY": key,
        "OUTRIDER_BASE_URL": base,
        "OUTRIDER_API_KEY": key,
        "OUTRIDER_MODEL": endpoint.model,
        "OUTRIDER_INSTRUCTION": instruction,
    }


ENDPOINT_VARIABLES = frozenset(endpoint_environment(ModelEndpoint(base_url="", api_key="", model=""), ""))
