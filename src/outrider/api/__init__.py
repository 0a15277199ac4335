"""Serves HTTP: the control API at `/v1` and the model gateway at `/s/{key}`.

This package has the routes, authentication and HTTP errors. `service` and `sessions` do the work.
"""
