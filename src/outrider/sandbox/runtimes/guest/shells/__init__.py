"""Live shells of a sandbox: bash, sh, Python and IPython. Also has the programs that run inside a Python or IPython
shell."""
