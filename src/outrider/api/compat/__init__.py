"""Offers the HTTP interfaces of other rollout systems, translated to Outrider's own. Each system has a module.

A client of another system needs only a new URL. Harbor's run API is served with the routes of `verl`, because verl's
recipe uses this API. The modules have no scheduler or store: they call `Service`. A request that cannot be translated
is refused with an error that names the field. `routes.py`, `endings.py`, `waiting.py` and `gateway_call.py` have the
parts that several systems use.
"""
