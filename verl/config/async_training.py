# SPDX-License-Identifier: Apache-2.0
"""Section `trainer.async_training`: sampling next to training, in processes of its own."""

from dataclasses import dataclass

from verl.config.schema import option


@dataclass(frozen=True)
class AsyncConfig:
    """Sampling next to training; needs `worker.hybrid_engine=false`."""

    mode: str = option(
        "off",
        "off: sampling and training take turns; one_step_off: each step trains on what was sampled during the"
        " one before, with weights that are one step old.",
        choices=("off", "one_step_off"),
    )

    @property
    def samples_ahead(self) -> bool:
        return self.mode != "off"
