"""Bridges to trainers: each bridge implements a trainer's interface by calls of the control API. Bridges are optional
extras. Within Outrider, only the training demo imports a bridge."""
