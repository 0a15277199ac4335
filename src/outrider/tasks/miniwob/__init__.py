"""Makes tasks from the pages of MiniWoB, to which scripts are added. Some tasks have a known solution."""
