"""Inference engines. `base` has their protocols, `pool` assigns an engine to each session, and `adapters` has an
adapter for each kind of engine server.

Engines take token ids or chat messages. They do not depend on sessions or on API dialects. A fake engine for tests,
`ScriptedEngine`, is in `outrider.lab.fakes`.
"""
