"""The environment variables of a session: its ids, its folders, and its model endpoint. The variables of the endpoint
have the names that vendors' programs read.

Invariant: a task cannot set any of these variables.
"""

from __future__ import annotations

from outrider.harnesses.base import ModelEndpoint, SessionFolders, SessionIds


def folder_environment(folders: SessionFolders) -> dict[str, str]:
    """Return the variables that name the session's folders. Agents written for Outrider read them."""
    return {"OUTRIDER_ARTIFACTS": folders.artifacts, "OUTRIDER_LOGS": folders.logs}


def endpoint_environment(endpoint: ModelEndpoint, instruction: str, ids: SessionIds) -> dict[str, str]:
    """Return the variables for the model endpoint and the instruction, under the names that the programs of each vendor
    read. The variables also contain the ids of the attempt, for agents written for Outrider."""
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
        "OUTRIDER_GROUP": ids.group_id,
        "OUTRIDER_SESSION": ids.session_id,
        "OUTRIDER_SAMPLE": str(ids.sample_index),
        "OUTRIDER_ATTEMPT": str(ids.attempt),
    }


ENDPOINT_VARIABLES = frozenset(
    endpoint_environment(ModelEndpoint(base_url="", api_key="", model=""), "", SessionIds())
    | folder_environment(SessionFolders())
)
