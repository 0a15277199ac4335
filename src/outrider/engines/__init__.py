"""Inference engines: the protocols (`base`), the pool that assigns an engine to each session (`pool`), and the adapters
for engine servers (`adapters`).

Engines take token ids or messages, and are independent of sessions and dialects. The fake engine, `ScriptedEngine`, is
in `outrider.lab.fakes`.
"""
