# SPDX-License-Identifier: Apache-2.0
"""The trainer's command for a run whose unlucky responses are masked just before their advantages."""

import sys
from contextlib import ExitStack

import torch

from tests.trainer.fails_for_some import is_unlucky
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.trainer.ray_trainer import RayPPOTrainer
from verl.trainer.run.run_once import open_trainer


class MaskingTrainer(RayPPOTrainer):
    def estimate_advantages(self, batch):
        mask, decode = batch.batch["loss_mask"], self.sampling.collector.sampler.decode
        texts = [
            decode(tokens[kept.bool()].tolist())
            for tokens, kept in zip(batch.batch["responses"], mask, strict=True)
        ]
        kept = torch.tensor([not is_unlucky(text) for text in texts])  # (B,)
        masked = batch.merge({"loss_mask": mask * kept[:, None]}, replace=["loss_mask"])
        return super().estimate_advantages(masked)


if __name__ == "__main__":
    config = load_config(PPOConfig, sys.argv[1:])
    with ExitStack() as stack:
        trainer = open_trainer(config, stack)
        trainer.__class__ = MaskingTrainer
        trainer.fit()
