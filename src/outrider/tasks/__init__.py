"""Makes tasks from data sets and from the formats of other systems."""
