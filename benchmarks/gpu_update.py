# SPDX-License-Identifier: Apache-2.0
"""Log-prob pass and update on one device: fraction of its matmul peak, tokens per second, peak memory.

    python benchmarks/gpu_update.py [--prompts 8 --responses 8 --prompt-length 512 --response-length 1024]
    python benchmarks/gpu_update.py --tiny --device cpu

A model with the shape of Qwen2.5-VL-3B and random weights, FSDP2 on one rank, packed rows, the fused head,
the PPO loss and AdamW: the trainer's own code without its processes. Needs torch and transformers only. The
last line is JSON.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from verl.algorithms.aggregation import aggregate_loss, count_denominators
from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from verl.distributed.device import backend_of, resolve_device, synchronize, to_device
from verl.distributed.fsdp import clip_grad_norm, make_mesh, shard_model
from verl.models.deferred_logits import DeferredLogits
from verl.models.flops import FlopsCounter, peak_flops
from verl.models.fused_log_probs import TokenLogProbs
from verl.models.position_ids import MropeConstants, continue_positions, position_ids_for
from verl.models.registry import prepare_model
from verl.optim.build import OPTIMIZERS, build_optimizer
from verl.workers.packing.packed_batch import ResponseTokens

SPECIAL = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-3b": dict(
        text_config=dict(
            vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
            num_attention_heads=16, num_key_value_heads=2, max_position_embeddings=128000,
            tie_word_embeddings=True, use_sliding_window=False,
            rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]),
        ),
        vision_config=dict(
            depth=32, num_heads=16, hidden_size=1280, intermediate_size=3420, out_hidden_size=2048,
            patch_size=14,
            window_size=112, fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2,
        ),
        tie_word_embeddings=True,
        **SPECIAL,
    ),
    "tiny": dict(
        text_config=dict(
            vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=4096, tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6]),
        ),
        vision_config=dict(
            depth=2, num_heads=4, hidden_size=64, intermediate_size=128, out_hidden_size=128, patch_size=14,
            window_size=56, fullatt_block_indexes=[1], tokens_per_second=2,
        ),
        tie_word_embeddings=True,
        image_token_id=500, video_token_id=501, vision_start_token_id=502, vision_end_token_id=503,
    ),
}  # fmt: skip
TINY = dict(
    shape="tiny", prompts=2, responses=2, prompt_length=24, response_length=16, image_tokens=(2, 3),
    micro_tokens=64, repeats=1, matmul_size=256,
)  # fmt: skip


@dataclass(frozen=True)
class ShardSettings:
    """The options of `worker.actor.fsdp` that sharding reads."""

    enable_full_shard: bool = True
    enable_cpu_offload: bool = False
    mp_param_dtype: str = "bf16"
    mp_reduce_dtype: str = "fp32"


@dataclass(frozen=True)
class OptimSettings:
    """The options of `worker.actor.optim` that the optimizer reads."""

    strategy: str
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    lr_factors: dict[str, float] = field(default_factory=dict)


class MicroBatch(NamedTuple):
    """A packed micro batch."""

    inputs: dict[str, Any]  # arguments of the prepared model
    targets: Tensor  # (M,) response tokens
    rows: Tensor  # (M,): index of the packed token before each target
    response_mask: Tensor  # (B, R)
    responses: ResponseTokens  # the ones of the mask
    lengths: list[int]  # tokens of each row
    grids: list[tuple[int, int, int]]  # sizes of the encoded images: once per prompt


class Work(NamedTuple):
    """Operations and tokens of all micro batches."""

    forward_flops: float
    training_flops: float
    tokens: int
    response_tokens: int


def build(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build a sharded model with random weights that takes packed rows."""
    config = AutoConfig.for_model("qwen2_5_vl", **SHAPES[options.shape])
    torch.manual_seed(0)
    with device:
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, options.weights))
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    prepare_model(model)
    shard_model(model, make_mesh(1, -1, device.type), ShardSettings())
    return model


def make_micro_batches(config: Any, options: argparse.Namespace, device: torch.device) -> list[MicroBatch]:
    """Fill micro batches with whole groups up to the token limit; response lengths are evenly spaced."""
    generator = torch.Generator().manual_seed(1)
    shortest = options.min_response_length or options.response_length
    count = options.prompts * options.responses
    lengths = (
        torch.linspace(shortest, options.response_length, count)
        .round()
        .int()[torch.randperm(count, generator=generator)]
    )
    groups = lengths.view(options.prompts, options.responses).tolist()
    batches, waiting = [], []
    for group in groups:
        if (
            waiting
            and sum(map(row_tokens(options), waiting)) + row_tokens(options)(group) > options.micro_tokens
        ):
            batches.append(pack_groups(config, waiting, options, generator, device))
            waiting = []
        waiting.append(group)
    return [*batches, pack_groups(config, waiting, options, generator, device)]


def row_tokens(options: argparse.Namespace) -> Callable[[list[int]], int]:
    """Return a function that counts the tokens of a group from its response lengths, prompts included."""
    return lambda group: sum(group) + len(group) * options.prompt_length


def pack_groups(
    config: Any,
    groups: list[list[int]],
    options: argparse.Namespace,
    generator: torch.Generator,
    device: torch.device,
) -> MicroBatch:
    """Pack prompts and responses into one row; a prompt's images are encoded once for all its responses."""
    merge, vision = config.vision_config.spatial_merge_size, config.vision_config
    height, width = options.image_tokens
    grid = (1, height * merge, width * merge)
    image = [
        config.vision_start_token_id,
        *[config.image_token_id] * (height * width),
        config.vision_end_token_id,
    ]
    num_text = options.prompt_length - options.images * len(image)
    if num_text < 1:
        raise ValueError(
            f"`--prompt-length` ({options.prompt_length}) must be more than the tokens of its images,"
            f" {options.images * len(image)}"
        )
    ordinary = min(SHAPES[options.shape]["image_token_id"], 500)
    prompt_grids = torch.tensor([grid] * options.images).reshape(-1, 3)
    position_ids = position_ids_for("qwen2_5_vl")
    ids, positions, order = [], [], []
    for number, group in enumerate(groups):
        prompt = torch.cat([
            torch.tensor(image * options.images, dtype=torch.int64),
            torch.randint(ordinary, (num_text,), generator=generator),
        ])  # fmt: skip
        known = position_ids(
            prompt, MropeConstants.from_config(config), image_grid_thw=prompt_grids
        )  # (4, P)
        for length in group:
            ids.append(torch.cat([prompt, torch.randint(ordinary, (length,), generator=generator)]))
            positions.append(torch.cat([known, continue_positions(known[:, -1], length)], 1))
            order.extend(range(number * options.images, (number + 1) * options.images))
    responses = torch.tensor([length for group in groups for length in group])
    lengths = responses + options.prompt_length
    ends = lengths.cumsum(0)
    rows = torch.cat(
        [torch.arange(end - size - 1, end - 1) for end, size in zip(ends, responses, strict=True)]
    )
    line = torch.cat(ids)
    inputs = {
        "input_ids": line[None],
        "position_ids": torch.cat(positions, 1)[:, None],  # (4, 1, N)
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
    }
    if options.images:
        count = len(groups) * options.images
        pixels = 3 * vision.temporal_patch_size * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(count * grid[1] * grid[2], pixels, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([grid] * count)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    if options.images:
        inputs["image_order"] = order
    mask = (torch.arange(int(responses.max())) < responses[:, None]).long()  # (B, R)
    tensors = to_device((line[rows + 1], rows, mask, ResponseTokens.of(mask)), device)
    grids = [grid] * (len(groups) * options.images)
    return MicroBatch(inputs, *tensors, lengths.tolist(), grids)


def run(model: nn.Module, batch: MicroBatch, with_entropy: bool = False) -> TokenLogProbs:
    """Return the log-probs of the response tokens."""

    def read(logits: DeferredLogits) -> TokenLogProbs:
        return logits.log_probs(batch.targets, batch.rows, temperature=1.0, with_entropy=with_entropy)

    return model(**batch.inputs, read=read)


def log_probs(model: nn.Module, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Compute the log-probs of all response tokens, (M,) for each micro batch."""
    model.eval()
    with torch.no_grad():
        return [run(model, batch).log_probs for batch in batches]


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[MicroBatch], old: Sequence[Tensor]
) -> float:
    """Run forward, backward, clipping and the optimizer step on a mini batch; returns the gradient norm."""
    model.train()
    denominators = count_denominators(
        torch.cat([batch.response_mask.flatten()[None] for batch in batches], 1)
    )
    for batch, old_log_probs in zip(batches, old, strict=True):
        mask = batch.response_mask
        result = run(model, batch, with_entropy=True)
        advantages = torch.linspace(-1, 1, len(mask), device=mask.device)[:, None].expand(mask.shape)
        inputs = PolicyLossInputs(
            batch.responses.unpack(result.log_probs),
            batch.responses.unpack(old_log_probs),
            advantages,
            mask,
        )
        aggregate_loss(POLICY_LOSSES["default"](inputs).per_token, mask, "token", denominators).backward()
    norm = clip_grad_norm(model, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def count_work(model: nn.Module, batches: Sequence[MicroBatch], device: torch.device) -> Work:
    """Count the necessary operations with `FlopsCounter`; recomputed activations do not count."""
    counter = FlopsCounter(model.config, device=device)
    forward = training = 0.0
    for batch in batches:
        responses = int(batch.response_mask.sum())
        forward += counter.forward(batch.lengths, num_response_tokens=responses, grids=batch.grids)
        training += counter.training(batch.lengths, num_response_tokens=responses, grids=batch.grids)
    tokens = sum(sum(batch.lengths) for batch in batches)
    return Work(forward, training, tokens, sum(int(batch.response_mask.sum()) for batch in batches))


def seconds_of(function: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the shortest of several runs after a warm-up run."""
    function()
    best = float("inf")
    for _ in range(repeats):
        synchronize(device.type)
        start = time.perf_counter()
        function()
        synchronize(device.type)
        best = min(best, time.perf_counter() - start)
    return best


def matmul_ceiling(device: torch.device, size: int) -> float:
    """Measure the operations per second of large square bf16 matmuls, the practical peak of the device."""
    best = 0.0
    for length in (size, size // 2):
        left, right = (torch.randn(length, length, device=device, dtype=torch.bfloat16) for _ in range(2))

        def products(a: Tensor = left, b: Tensor = right) -> None:
            for _ in range(10):
                a @ b

        best = max(best, 10 * 2 * length**3 / seconds_of(products, device, 3))
    return best


def peak_gib(device: torch.device) -> float:
    """Peak memory of the device; on CPU, of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory of the device; the peak of a process cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    ceiling = matmul_ceiling(device, options.matmul_size)
    model = build(options, device)
    optimizer = build_optimizer(model, OptimSettings(options.optimizer))
    batches = make_micro_batches(model.config, options, device)
    work = count_work(model, batches, device)
    datasheet = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "shape": options.shape,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "micro_batches": len(batches),
        "tokens": work.tokens,
        "response_tokens": work.response_tokens,
        "ceiling_tflops": ceiling / 1e12,
        "weights_gib": peak_gib(device),
    }
    old = log_probs(model, batches)
    passes = {
        "log_probs": (lambda: log_probs(model, batches), work.forward_flops),
        "update": (lambda: update(model, optimizer, batches, old), work.training_flops),
    }
    for name, (run, flops) in passes.items():
        reset_peak(device)
        seconds = seconds_of(run, device, options.repeats)
        result[name] = {
            "seconds": seconds,
            "tokens_per_s": work.tokens / seconds,
            "tflops": flops / seconds / 1e12,
            "share_of_ceiling": flops / seconds / ceiling,
            "mfu": None if datasheet is None else flops / seconds / datasheet,
            "peak_gib": peak_gib(device),
        }
    return result


def print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['device']}, torch {result['torch']}; {result['shape']},"
        f" {result['parameters'] / 1e6:.1f} M parameters"
    )
    print(
        f"{result['tokens']} tokens in {result['micro_batches']} micro batches;"
        f" matmul ceiling {result['ceiling_tflops']:.3g} TFLOP/s"
    )
    print(f"{'':<12}{'seconds':>9}{'tokens/s':>11}{'TFLOP/s':>9}{'of ceiling':>12}{'MFU':>7}{'peak GiB':>10}")
    for name in ("log_probs", "update"):
        row = result[name]
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.0%}"
        print(
            f"{name:<12}{row['seconds']:>9.3f}{row['tokens_per_s']:>11.0f}{row['tflops']:>9.3g}"
            f"{row['share_of_ceiling']:>12.0%}{mfu:>7}{row['peak_gib']:>10.1f}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-vl-3b")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--responses", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt-length", type=int, default=512, help="tokens, including image tokens")
    parser.add_argument("--response-length", type=int, default=1024, help="tokens of the longest response")
    parser.add_argument(
        "--min-response-length",
        type=int,
        default=None,
        help="tokens of the shortest response (default: all equal)",
    )
    parser.add_argument("--images", type=int, default=1, help="images per prompt; 0 uses text only")
    parser.add_argument("--image-tokens", type=int, nargs=2, default=(16, 16), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--micro-tokens", type=int, default=16384, help="tokens per micro batch")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument(
        "--weights",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the stored weights",
    )
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--matmul-size", type=int, default=8192)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--tiny", action="store_true", help="test that it runs, in seconds on CPU; the speed means nothing"
    )
    if parser.parse_known_args()[0].tiny:
        parser.set_defaults(**TINY)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    device = torch.device(resolve_device(options.device))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            backend_of(device.type),
            store=dist.FileStore(str(Path(folder) / "ranks"), 1),
            rank=0,
            world_size=1,
        )
        try:
            result = measure(options, device)
        finally:
            dist.destroy_process_group()
    print_table(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
