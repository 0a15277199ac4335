"""One module for each engine server (vLLM, SGLang, any OpenAI-compatible one), and shared parts of their protocols."""
