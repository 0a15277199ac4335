"""The parts with which a trainer uses a service: the client of the control API, batches of groups for training, pass
rates, and files of samples."""
