"""Records a program that a user runs by hand: writes a transcript of its model calls, and drafts a task that runs the
program again."""
