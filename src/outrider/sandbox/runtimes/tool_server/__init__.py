"""The host's end of the tool server that runs in every sandbox: its launch, the calls to it and file transfers."""
