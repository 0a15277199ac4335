"""Functions that read, write, search, archive and restore files in a sandbox, with any names and at any depth."""
