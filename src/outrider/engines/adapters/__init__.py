"""One module for each engine server (vLLM, SGLang, any OpenAI-compatible one), and what their protocols share."""
