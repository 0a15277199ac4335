"""Inference engines. `base` has the protocols, `pool` assigns an engine to each session, and `adapters` has one adapter
for each kind of engine server.

Engines take token ids or messages, and are independent of sessions and of API dialects. The fake engine,
`ScriptedEngine`, is in `outrider.lab.fakes`.
"""
