"""Live shells of a sandbox (bash, sh, Python and IPython), and the programs that run in the Python and IPython ones."""
