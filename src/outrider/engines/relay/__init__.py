"""Engines whose workers connect to the service: the messages, the service's end of one worker, and the engine.

The worker's end, beside the model, is `outrider.relay`. HTTP and WebSocket do not belong here: see `outrider.wire`.
"""
