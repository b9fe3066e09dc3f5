# SPDX-License-Identifier: Apache-2.0
"""The trainer's command for a run whose unlucky responses are masked just before their advantages."""

import sys

import torch

from tests.trainer.fails_for_some import is_unlucky
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.planning.planned_run import planned_ppo
from verl.trainer.prepare import prepared_run
from verl.trainer.ray_trainer import RayPPOTrainer
from verl.trainer.setup import running_trainer


class MaskingTrainer(RayPPOTrainer):
    def estimate_advantages(self, batch):
        mask, decode = batch.batch["loss_mask"], self.collector.sampler.decode
        texts = [
            decode(tokens[kept.bool()].tolist())
            for tokens, kept in zip(batch.batch["responses"], mask, strict=True)
        ]
        kept = torch.tensor([not is_unlucky(text) for text in texts])  # (B,)
        masked = batch.merge({"loss_mask": mask * kept[:, None]}, replace=["loss_mask"])
        return super().estimate_advantages(masked)


if __name__ == "__main__":
    config = load_config(PPOConfig, sys.argv[1:])
    with prepared_run(config, planned_ppo) as run, running_trainer(*run) as trainer:
        trainer.__class__ = MaskingTrainer
        trainer.fit()
