"""Lets users and tests try the service without an engine server, an agent program or a trainer: the demo, the fakes,
and the certification of agent programs.

The fakes and the real implementations pass the same contract tests.
"""
