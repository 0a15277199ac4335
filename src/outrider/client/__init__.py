"""The trainer's side of the service: the client, batches of groups for training, pass rates, and samples as files."""
