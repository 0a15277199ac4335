"""Adapters for engine servers. vLLM, SGLang and OpenAI-compatible servers have one module each; the other modules are
shared by these adapters."""
