"""Makes tasks from the pages of MiniWoB, with scripts added to the pages. Some tasks have a known solution."""
