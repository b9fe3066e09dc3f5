# SPDX-License-Identifier: Apache-2.0
"""Optimizer state per parameter and update time of each optimizer, on layers of a real model.

    python3 benchmarks/optimizers.py --device cuda

The model has the shapes of Qwen2.5-1.5B, with fewer layers and a smaller vocabulary. Prints a line of JSON
for each strategy: bytes of weights and of state per parameter, and milliseconds per update.
"""

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
import argparse
import json
import statistics
import time

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config.model import OptimConfig
from verl.optim.build import OPTIMIZERS, build_optimizer

IN_BF16 = ("adamw_bf16", "adamw_bf16_sr")
WARM_UP = 2  # updates; the first one compiles


def make_model(layers: int, vocab: int, dtype: torch.dtype, device: str) -> nn.Module:
    """Build a model with random weights and gradients."""
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=1536, intermediate_size=8960, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(dtype)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return model


def measure(strategy: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, object]:
    model = make_model(options.layers, options.vocab, dtype, options.device)
    optimizer = build_optimizer(model, OptimConfig(strategy=strategy))
    seconds = []
    for _ in range(WARM_UP + options.updates):
        start = time.perf_counter()
        optimizer.step()
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    parameters = sum(param.numel() for param in model.parameters())
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "strategy": strategy,
        "weights": str(dtype).removeprefix("torch."),
        "parameters": parameters,
        "weight_bytes": dtype.itemsize,
        "state_bytes": round(sum(value.numel() * value.element_size() for value in kept) / parameters, 3),
        "update_ms": round(1000 * statistics.median(seconds[WARM_UP:]), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--updates", type=int, default=10)
    options = parser.parse_args()
    for strategy in OPTIMIZERS:
        default = torch.bfloat16 if strategy in IN_BF16 else torch.float32
        for dtype in {default: None, torch.bfloat16: None} if strategy == "adamw_8bit" else (default,):
            print(json.dumps(measure(strategy, dtype, options)), flush=True)


if __name__ == "__main__":
    main()
