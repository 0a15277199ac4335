"""Bridges to trainers, from a trainer's interface to the control API. A bridge is an optional extra: in Outrider, only
the training demo imports a bridge."""
