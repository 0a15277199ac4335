"""HTTP: the control API under `/v1` and the model gateway under `/s/{key}`.

Routes, authentication, and HTTP errors; what the routes do is in `service` and `sessions`.
"""
