"""Programs that run directly on the host: without isolation (`process`), or confined by Landlock."""
