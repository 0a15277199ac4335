"""Inference engines: the protocols (`base`), the pool that assigns an engine to each session, and an adapter for each
server.

Engines take token ids or messages, and have no notion of a session or a dialect. The fake engine, `ScriptedEngine`, is
in `outrider.lab.fakes`.
"""
