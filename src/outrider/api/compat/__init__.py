"""The HTTP interfaces of other rollout systems, translated to Outrider's own: one module for each system.

A client of such a system needs only another URL. Harbor's run API is served together with `verl`, because verl's recipe
uses it. The modules have no scheduler and no store of their own: they call `Service`. A request that cannot be
translated is refused, and the error names the field. `routes.py`, `endings.py`, `waiting.py` and `gateway_call.py` are
shared by the systems.
"""
