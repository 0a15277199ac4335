"""What a trainer needs to use a service: the client of the control API, batches of groups for training, pass rates, and
files of samples."""
