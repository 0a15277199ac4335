"""Root file systems for sandboxes ("images"): imported, pulled, built and stored. They know no sandbox."""
