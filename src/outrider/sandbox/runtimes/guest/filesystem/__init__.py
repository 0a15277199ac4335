"""Files in a sandbox, with any names and at any depth: read, written, searched, patched, archived and restored."""
