"""Bridges to trainers such as verl, slime and TRL. A bridge implements a trainer's interface with calls of Outrider's
control API. Each bridge is an optional extra. Within Outrider, only the training demo imports a bridge."""
