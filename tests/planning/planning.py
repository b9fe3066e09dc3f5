# SPDX-License-Identifier: Apache-2.0
"""A model with 2**30 weights, and machines to plan its memory for."""

from verl.planning.layer_sizes import LayerCache, Stack
from verl.planning.machine import GIB, Machine
from verl.planning.memory_model import ModelShape

STACK = Stack(
    layers=16, hidden=4096, intermediate=16384, heads=32, kv_heads=8, head_dim=128, params=1 << 26,
    caches=(LayerCache(16 * 2 * 8 * 128, 8),),
)  # fmt: skip
TOWER = Stack(layers=2, hidden=1024, intermediate=4096, heads=8, kv_heads=8, head_dim=128, params=1 << 22)
GPU = Machine("cuda", 80 * GIB, 1000 * GIB, "a GPU")
NODE = Machine("cpu", 0, 400 * GIB, "a node")


def read_shape(model, fsdp, *, option, is_trained, head="causal", tower=None):
    """Like `verl.planning.model_sizes.read_shape`, but always the same model."""
    number = 2 if not is_trained or fsdp.torch_dtype == "bf16" else 4
    trained = (1 << 30) * is_trained
    return ModelShape(
        params=1 << 30, stored=number << 30, trained=trained, trained_stored=number * trained,
        root=1 << 20, trained_root=1 << 20, largest_stored=number << 20, vocab=256, is_tied=True, text=STACK,
        tower=tower,
    )  # fmt: skip
