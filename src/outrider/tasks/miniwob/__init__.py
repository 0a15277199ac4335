"""Makes tasks from the web pages of MiniWoB, with scripts added to them. Some tasks have a known solution."""
