"""Bridges to trainers: each speaks its trainer's interface on one side and the control API on the other. A bridge is an
optional extra, and nothing else of Outrider imports one but the demo that trains."""
