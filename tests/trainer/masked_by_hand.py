# SPDX-License-Identifier: Apache-2.0
"""The trainer's command for a run whose unlucky responses are masked just before their advantages."""

import sys

import torch

from tests.trainer.fails_for_some import is_unlucky
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.trainer.core_algos import replace_tensors
from verl.trainer.ray_trainer import RayPPOTrainer
from verl.trainer.setup import running_trainer


class MaskingTrainer(RayPPOTrainer):
    def estimate_advantages(self, batch):
        mask, decode = batch.batch["response_mask"], self.collector.sampler.decode
        texts = [
            decode(tokens[kept.bool()].tolist())
            for tokens, kept in zip(batch.batch["responses"], mask, strict=True)
        ]
        kept = torch.tensor([not is_unlucky(text) for text in texts])  # (B,)
        return super().estimate_advantages(replace_tensors(batch, response_mask=mask * kept[:, None]))


if __name__ == "__main__":
    with running_trainer(load_config(PPOConfig, sys.argv[1:])) as trainer:
        trainer.__class__ = MaskingTrainer
        trainer.fit()
