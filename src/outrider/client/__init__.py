"""The trainer's side of the service: the client of the control API, batches of groups for training, pass rates, and
samples as files."""
