"""SkyRL's PPO trainer with agents in sandboxes of an Outrider service.

The arguments are those of `skyrl.train.entrypoints.main_base`. The bridge's settings are in $OUTRIDER_SKYRL, as JSON or
@FILE: see settings.toml beside this file.
"""

import sys

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.utils import initialize_ray, validate_cfg

from outrider.trainers.skyrl import LossPerRollout, OutriderGenerator


class Trainer(LossPerRollout, RayPPOTrainer):
    pass


class Experiment(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return OutriderGenerator(cfg.generator)

    def get_trainer(self, **parts):
        return Trainer(**parts)


@ray.remote(num_cpus=1)
def entrypoint(cfg):
    Experiment(cfg).run()


if __name__ == "__main__":
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(entrypoint.remote(cfg))
