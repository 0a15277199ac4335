"""The service: it admits groups of sessions, schedules them on nodes, and delivers the results. `api/` serves it over
HTTP."""
