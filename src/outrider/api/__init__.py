"""HTTP: the control API under `/v1` and the model gateway under `/s/{key}`.

Routes only; what they do is in `service` and `sessions`.
"""
