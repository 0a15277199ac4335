"""Live shells of a sandbox (bash, Python, IPython), and the programs that run inside its interpreters."""
