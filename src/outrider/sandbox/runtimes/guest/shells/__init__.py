"""Live shells of a sandbox: bash or sh, and the programs that run as live Python and live IPython."""
