"""Inference engines: the protocols (`base`), the pool that assigns one to each session, and an adapter for each server.

Engines take token ids or messages, and have no notion of a session or a dialect. The fake, `ScriptedEngine`, is in
`testing`.
"""
