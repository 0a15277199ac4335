"""Engines that dial in: the relay's protocol (`messages`, `link`), the service's end of one worker, and the engine.

`outrider.relay` is the other end, beside the model. HTTP and WebSocket are not part of this room.
"""
