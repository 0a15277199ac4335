"""Tasks of MiniWoB: its pages, what is added to them, and known solutions of some."""
