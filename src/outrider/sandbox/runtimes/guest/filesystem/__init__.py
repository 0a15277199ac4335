"""Files in a sandbox: read, written, searched, patched, archived and restored, however odd their names or depth."""
