"""Parts for trying the service without an engine server, an agent program or a trainer: the demo, fakes of all parts,
and the certification of agent programs.

The fakes pass the same contract tests as the real parts.
"""
