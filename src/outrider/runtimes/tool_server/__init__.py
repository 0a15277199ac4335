"""The host's end of the tool server that runs in every sandbox: how it is launched, called and sent files."""
