"""Inference engines: the seam (`base`), the pool that gives each session one, and an adapter for each server.

Engines know token ids and messages; they know no session and no dialect. The fake, `ScriptedEngine`, is in `testing`.
"""
