# SPDX-License-Identifier: Apache-2.0
"""Mistakes that run on a CPU and fail on a GPU, each put into the project's own code in one process."""

from typing import Any

import torch

from tests.virtual.device import TYPE


def host_tensor_in_loss() -> None:
    """Mix a tensor of the host into the loss."""
    from verl.workers.roles.loss_terms import PolicyTokens

    original = PolicyTokens.__call__

    def policy_loss(self: Any, result: Any, tensors: Any) -> Any:
        mixed = result.log_probs * torch.ones(result.log_probs.shape)
        return original(self, result._replace(log_probs=mixed), tensors)

    PolicyTokens.__call__ = policy_loss


def number_of_loss() -> None:
    """Read the loss of each micro batch."""
    from verl.workers.roles.updater import Updater

    original = Updater.backward

    def backward(self: Any, loss: torch.Tensor) -> None:
        original(self, loss)
        loss.item()

    Updater.backward = backward


def mask_as_index() -> None:
    """Select tokens by a mask on the device, whose number the host must wait for."""
    from verl.workers.packing.forward import PackedForward

    original = PackedForward._run

    def run(self: Any, inputs: Any, read: Any) -> Any:
        ids = inputs["input_ids"]
        assert ids[ids > 0].numel(), "every token is above zero"
        return original(self, inputs, read)

    PackedForward._run = run


def lengths_sent_singly() -> None:
    """Make a tensor on the device for each row."""
    from verl.workers.packing.forward import PackedForward

    original = PackedForward._run

    def run(self: Any, inputs: Any, read: Any) -> Any:
        for length in range(8):
            torch.tensor([length], device=TYPE)
        return original(self, inputs, read)

    PackedForward._run = run


def tower_only_where_media_are() -> None:
    """Run the vision tower, whose weights are gathered, only on ranks whose rows have media."""
    from verl.workers.packing.forward import PackedForward

    original = PackedForward._with_media

    def with_media(self: Any, packed: Any, micro: Any) -> Any:
        column = micro.non_tensor_batch.get("multi_modal_data")
        if column is None or not any(row and any(row.values()) for row in column):
            return packed, {}
        return original(self, packed, micro)

    PackedForward._with_media = with_media


def moments_on_device() -> None:
    """Load the moments of weights that stay in host memory onto the device."""
    from verl.workers.roles.updater import Updater

    original = Updater.step

    def step(self: Any) -> None:
        for state in self.optimizer.state.values():
            for key, value in state.items():
                state[key] = value.to(TYPE)
        original(self)

    Updater.step = step
