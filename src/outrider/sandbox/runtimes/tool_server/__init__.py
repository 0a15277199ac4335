"""The host's side of the tool server: launches it in every sandbox, calls it, and transfers files."""
