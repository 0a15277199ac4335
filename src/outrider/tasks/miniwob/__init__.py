"""Tasks of MiniWoB: its pages, the scripts added to them, and known solutions of some."""
