"""Records a program that is run by hand: its model calls on the wire, and a draft of a task that runs the program."""
