"""Adapters for engine servers. vLLM, SGLang and OpenAI-compatible servers have one module each. The adapters share the
other modules."""
