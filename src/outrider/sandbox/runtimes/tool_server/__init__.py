"""The host's side of the tool server, which runs in every sandbox. It launches the server, calls it, and transfers
files."""
