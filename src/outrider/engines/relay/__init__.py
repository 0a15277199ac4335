"""Engines that dial in: the relay's protocol (`messages`, `link`), one worker as the service has it, and the engine.

The other end, which runs beside the model, is `outrider.relay`. Nothing here knows HTTP or WebSocket.
"""
