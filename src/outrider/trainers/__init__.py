"""Bridges to trainers. A bridge implements a trainer's interface by calls of Outrider's control API. Each bridge is an
optional extra; within Outrider, only the training demo imports one."""
