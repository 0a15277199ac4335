"""The agent of OpenRLHF's `--train.agent_func_path`. Its settings are in $OUTRIDER_OPENRLHF, as JSON or @FILE."""

from outrider.trainers.openrlhf import agent_executor

AgentExecutor = agent_executor()
