# SPDX-License-Identifier: Apache-2.0
"""Options of the processes that fine-tune a model; their keys are the policy's in `config.py`."""

from dataclasses import dataclass

from verl.config.schema import option
from verl.config.update_options import MicroBatchSize, PolicyConfig, micro_batch_option


@dataclass(frozen=True)
class SFTActorConfig(PolicyConfig):
    """The model that is fine-tuned, and its update."""

    global_batch_size: int = option(64, help="Rows in a step: one update.", minimum=1)
    micro_batch_size_per_device_for_experience: MicroBatchSize = micro_batch_option(
        8, "runs forward at once in validation"
    )
    dynamic_batching: bool = option(
        True, help="Fill a micro batch up to the tokens of its size x `data.max_length`, not by sequences."
    )


@dataclass(frozen=True)
class SFTWorkerConfig:
    """The processes that hold the model."""

    actor: SFTActorConfig = option(
        SFTActorConfig,
        help="The model that is fine-tuned, and its update.",
        example={
            "micro_batch_size_per_device_for_update": 1,
            "micro_batch_size_per_device_for_experience": 2,
            "optim": {"lr": 1e-5, "lr_scheduler_type": "cosine", "lr_warmup_ratio": 0.03},
        },
    )
