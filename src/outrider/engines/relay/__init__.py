"""Engines whose workers connect to the service (relay engines): their messages, the service's side of one worker, and
the engine itself.

The worker's side, next to the model, is `outrider.relay`. HTTP and WebSocket are in `outrider.wire`.
"""
