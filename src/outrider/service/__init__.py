"""The service: it admits groups of sessions, schedules the sessions on nodes, and delivers the results. `api/` serves
it over HTTP."""
