"""HTTP: the control API under `/v1` and the model gateway under `/s/{key}`.

Routes, authentication and HTTP errors are here; `service` and `sessions` do the work.
"""
