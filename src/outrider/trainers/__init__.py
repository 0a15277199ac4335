"""Bridges to reinforcement-learning trainers such as verl, slime and TRL. A bridge implements a trainer's interface
with calls of Outrider's control API.

Each bridge is an optional extra. Apart from the training demo, no other part of Outrider imports one."""
