"""Makes tasks from data sets, and from the task formats of other systems."""
