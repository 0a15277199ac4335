"""Engines whose workers connect to the service: the protocol (`messages`, `link`), the service's end of a worker, the
engine.

The worker's end, beside the model, is `outrider.relay`. HTTP and WebSocket do not belong here.
"""
