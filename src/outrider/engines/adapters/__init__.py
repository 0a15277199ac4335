"""Adapters for engine servers: one module each for vLLM, SGLang, OpenAI-compatible servers, ProRL's servers and verl's
workers. The other modules are shared by several adapters."""
