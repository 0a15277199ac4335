"""The live shells of a sandbox: bash or sh, and the programs of live Python and IPython shells."""
