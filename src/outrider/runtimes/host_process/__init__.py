"""Programs on the host itself: without isolation (`process`), or confined by Landlock."""
