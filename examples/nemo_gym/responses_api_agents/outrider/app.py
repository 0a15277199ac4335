"""NeMo Gym's agent server for rollouts of an Outrider service: settings are in configs/outrider.yaml."""

from outrider.trainers.nemo_gym import agent_class

OutriderAgent = agent_class()

if __name__ == "__main__":
    OutriderAgent.run_webserver()
