# SPDX-License-Identifier: Apache-2.0
"""Log-prob pass and update on one device: fraction of its matmul peak, tokens per second, peak memory.

    python benchmarks/gpu_update.py [--shape 7b --prompts 8 --responses 8 --prompt-length 512]
    python benchmarks/gpu_update.py --tiny --device cpu

A model with the shape of Qwen2.5-VL-3B or 7B and random weights, FSDP2 on one rank, packed rows, the fused
head, the PPO loss and AdamW: the trainer's own code without its processes. Not measured: the engine, rewards,
traffic between ranks.

Each pass runs with a copy of the prompt for each response (`log_probs`, `update`) and, as
`worker.actor.share_prompt` does by default, with one for all (`shared_*`). Tokens are those of the responses
and a prompt for each of them in both cases. MFU counts necessary operations: no recomputed activations, and
one pass of a shared prompt. Weights are float32 with AdamW if they fit the device, else bfloat16 with
`adamw_bf16`, else with `adamw_8bit`.

Needs torch and transformers only. The last line is JSON.
"""

import argparse
import itertools
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from verl.distributed.known_gpus import find_gpu
from verl.models.attention.layouts import PackedLayout
from verl.models.deferred_logits import DeferredLogits
from verl.models.families.interface import MediaShape, Medium, MediumShape
from verl.models.families.mrope import continue_positions
from verl.models.families.registry import media_family_of
from verl.models.flops import FlopsCounter, PackedWork
from verl.models.fused_log_probs import TokenLogProbs
from verl.models.hub_names import meta_model
from verl.models.registry import prepare_model
from verl.optim.build import OPTIMIZERS, build_optimizer
from verl.workers.packing.packed_batch import ResponseTokens

SPECIAL = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}  # fmt: skip
ROPE = dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24])
VISION = dict(
    depth=32, num_heads=16, hidden_size=1280, intermediate_size=3420, patch_size=14, window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2,
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "3b": dict(
        text_config=dict(
            vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
            num_attention_heads=16, num_key_value_heads=2, max_position_embeddings=128000,
            tie_word_embeddings=True, use_sliding_window=False, rope_parameters=ROPE,
        ),
        vision_config=VISION | dict(out_hidden_size=2048),
        tie_word_embeddings=True,
        **SPECIAL,
    ),
    "7b": dict(
        text_config=dict(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
            num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=128000,
            tie_word_embeddings=False, use_sliding_window=False, rope_parameters=ROPE,
        ),
        vision_config=VISION | dict(out_hidden_size=3584),
        tie_word_embeddings=False,
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
PASSES = ("log_probs", "update", "shared_log_probs", "shared_update")
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


class Storage(NamedTuple):
    """Number types of weights and optimizer state: `Storage("float32", "adamw", 16)`."""

    weights: str
    optimizer: str
    bytes_per_parameter: int  # weight, gradient, moments


STORAGES = (  # the largest that fits is taken
    Storage("float32", "adamw", 16),
    Storage("bfloat16", "adamw_bf16", 10),
    Storage("bfloat16", "adamw_8bit", 6),
)
# Of 16,384 tokens: checkpointed activations, chunks of logits, gathered blocks, the head's gradient, images.
WORKING_BYTES = 18 << 30


class Group(NamedTuple):
    """A prompt with its images, and its responses."""

    prompt: Tensor  # (P,)
    positions: Tensor  # (4, P)
    responses: list[Tensor]
    images: list[Medium]

    def num_tokens(self, is_shared: bool) -> int:
        copies = 1 if is_shared else len(self.responses)
        return copies * len(self.prompt) + sum(map(len, self.responses))


class MicroBatch(NamedTuple):
    """A packed micro batch."""

    inputs: dict[str, Any]  # arguments of the prepared model
    targets: Tensor  # (M,) response tokens
    rows: Tensor  # (M,): index of the packed token before each target
    response_mask: Tensor  # (B, R)
    responses: ResponseTokens  # the ones of the mask
    groups: list[tuple[int, list[int]]]  # tokens of prompts, and of the responses that share them
    tokens: int  # of all rows, each with its prompt


class Work(NamedTuple):
    """Operations and tokens of all micro batches."""

    forward_flops: float
    training_flops: float
    tokens: int
    response_tokens: int


def choose_storage(options: argparse.Namespace, parameters: int, memory: float) -> Storage:
    """The options' number types, or the largest that fit `memory` bytes next to the activations."""
    fitting = [
        one for one in STORAGES
        if options.weights in ("auto", one.weights) and options.optimizer in ("auto", one.optimizer)
    ] or [Storage(options.weights, options.optimizer, 16)]  # fmt: skip
    fits = [one for one in fitting if one.bytes_per_parameter * parameters + WORKING_BYTES <= memory]
    return (fits or fitting[-1:])[0]


def device_bytes(device: torch.device) -> float:
    """Memory of the device; a CPU counts as large enough."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else float("inf")


def build(options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Storage]:
    """Build a sharded model with random weights that takes packed rows."""
    config = AutoConfig.for_model("qwen2_5_vl", **SHAPES[options.shape])
    parameters = sum(weight.numel() for weight in meta_model(config).parameters())
    storage = choose_storage(options, parameters, device_bytes(device))
    torch.manual_seed(0)
    with device:
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, storage.weights))
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    prepare_model(model)
    shard_model(model, make_mesh(1, -1, device.type), ShardSettings())
    return model, storage


def make_groups(config: Any, options: argparse.Namespace) -> list[Group]:
    """Make prompts and responses of random tokens; response lengths are evenly spaced."""
    generator = torch.Generator().manual_seed(1)
    shortest = options.min_response_length or options.response_length
    count = options.prompts * options.responses
    lengths = (
        torch.linspace(shortest, options.response_length, count)
        .round()
        .int()[torch.randperm(count, generator=generator)]
    )
    return [
        make_group(config, options, group, generator)
        for group in lengths.view(options.prompts, options.responses).tolist()
    ]


def image_grid(config: Any, options: argparse.Namespace) -> tuple[int, int, int]:
    merge = config.vision_config.spatial_merge_size
    height, width = options.image_tokens
    return 1, height * merge, width * merge


def make_group(
    config: Any, options: argparse.Namespace, lengths: list[int], generator: torch.Generator
) -> Group:
    grid, vision = image_grid(config, options), config.vision_config
    height, width = options.image_tokens
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
    text = torch.randint(ordinary, (num_text,), generator=generator)
    prompt = torch.cat([torch.tensor(image * options.images, dtype=torch.int64), text])
    shape = MediaShape(images=[MediumShape([], {"grid_thw": grid})] * options.images)
    positions = media_family_of(config).positions(config, prompt, shape)  # (4, P)
    assert positions is not None, "the model has M-RoPE"
    responses = [torch.randint(ordinary, (length,), generator=generator) for length in lengths]
    patches = options.images * grid[1] * grid[2], 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(*patches, generator=generator).split(grid[1] * grid[2]) if options.images else ()
    images = [Medium("image", {"pixel_values": image}, {"grid_thw": grid}) for image in pixels]
    return Group(prompt, positions, responses, images)


def make_micro_batches(
    config: Any, options: argparse.Namespace, device: torch.device, *, is_shared: bool
) -> list[MicroBatch]:
    """Fill micro batches with whole groups up to the token limit."""
    batches: list[MicroBatch] = []
    waiting: list[Group] = []
    for group in make_groups(config, options):
        tokens = sum(one.num_tokens(is_shared) for one in (*waiting, group))
        if waiting and tokens > options.micro_tokens:
            batches.append(pack_groups(config, options, waiting, device, is_shared))
            waiting = []
        waiting.append(group)
    return [*batches, pack_groups(config, options, waiting, device, is_shared)]


def pack_groups(
    config: Any, options: argparse.Namespace, groups: list[Group], device: torch.device, is_shared: bool
) -> MicroBatch:
    """Pack prompts and responses into one row; a prompt's images are encoded once for all its responses."""
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    rows: list[Tensor] = []
    order: list[int] = []  # the image of each image in the row
    size = last = 0
    for number, group in enumerate(groups):
        for index, response in enumerate(group.responses):
            if not (is_shared and index):
                ids.append(group.prompt)
                positions.append(group.positions)
                order += range(number * options.images, (number + 1) * options.images)
                size += len(group.prompt)
                last = size - 1
            ids.append(response)
            positions.append(continue_positions(group.positions[:, -1], len(response)))
            # The prompt's last token predicts a response's first.
            rows.append(torch.cat([torch.tensor([last]), torch.arange(size, size + len(response) - 1)]))
            size += len(response)
    inputs: dict[str, Any] = {
        "input_ids": torch.cat(ids)[None].to(device),
        "position_ids": torch.cat(positions, 1)[:, None].to(device),  # (4, 1, N)
    }
    lengths = [len(group.prompt) + len(one) for group in groups for one in group.responses]
    sizes: list[tuple[int, list[int]]] = [(length, []) for length in lengths]
    if is_shared:
        sizes = [(len(group.prompt), [len(one) for one in group.responses]) for group in groups]
        inputs["packed_layout"] = PackedLayout.of_groups(sizes, device)
    else:
        inputs["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device)
    if options.images:
        inputs["media"] = to_device([image for group in groups for image in group.images], device)
        inputs["media_order"] = {"image": order}
    responses = [response for group in groups for response in group.responses]
    num_tokens = torch.tensor([len(response) for response in responses])
    mask = (torch.arange(int(num_tokens.max())) < num_tokens[:, None]).long()  # (B, R)
    tensors = to_device((torch.cat(responses), torch.cat(rows), mask, ResponseTokens.of(mask)), device)
    return MicroBatch(inputs, *tensors, sizes, sum(lengths))


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


def count_work(model: Any, batches: Sequence[MicroBatch]) -> Work:
    """Count the necessary operations with `FlopsCounter`; recomputed activations do not count."""
    counter = FlopsCounter(model)
    forward = training = 0.0
    for batch in batches:
        work = PackedWork(batch.groups, int(batch.response_mask.sum()))
        parts = counter.count(work, batch.inputs.get("media", ()))
        forward += parts[0]
        training += sum(parts)
    responses = sum(int(batch.response_mask.sum()) for batch in batches)
    return Work(forward, training, sum(batch.tokens for batch in batches), responses)


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
    model, storage = build(options, device)
    optimizer = build_optimizer(model, OptimSettings(storage.optimizer))
    repeated, shared = (
        make_micro_batches(model.config, options, device, is_shared=is_shared) for is_shared in (False, True)
    )
    work = count_work(model, repeated)
    old = {name: log_probs(model, batches) for name, batches in (("", repeated), ("shared_", shared))}
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "shape": options.shape,
        "weights": storage.weights,
        "optimizer": storage.optimizer,
        "checkpointing": options.checkpointing,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "micro_batches": len(repeated),
        "tokens": work.tokens,
        "response_tokens": work.response_tokens,
        "ceiling_tflops": ceiling / 1e12,
        "weights_gib": peak_gib(device),
        # largest difference of a log-prob when the prompt is shared
        "shared_difference": float((torch.cat(old["shared_"]) - torch.cat(old[""])).abs().max()),
    }
    for prefix, batches in (("", repeated), ("shared_", shared)):
        done = count_work(model, batches)
        passes = {
            "log_probs": (partial(log_probs, model, batches), done.forward_flops),
            "update": (partial(update, model, optimizer, batches, old[prefix]), done.training_flops),
        }
        for name, (run, flops) in passes.items():
            result[prefix + name] = time_pass(run, flops, ceiling, work.tokens, device, options.repeats)
    return result


def time_pass(
    run: Callable[[], Any], flops: float, ceiling: float, tokens: int, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Time a pass and relate it to the device's measured and published peaks."""
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    reset_peak(device)
    seconds = seconds_of(run, device, repeats)
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tflops": flops / seconds / 1e12,
        "share_of_ceiling": flops / seconds / ceiling,
        "mfu": None if gpu is None else flops / seconds / gpu.peak,
        "peak_gib": peak_gib(device),
    }


def print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['device']}, torch {result['torch']}; {result['shape']},"
        f" {result['parameters'] / 1e6:.1f} M parameters in {result['weights']}, {result['optimizer']},"
        f" {'with' if result['checkpointing'] else 'without'} checkpointing"
    )
    print(
        f"{result['tokens']} tokens in {result['micro_batches']} micro batches;"
        f" matmul ceiling {result['ceiling_tflops']:.3g} TFLOP/s"
    )
    print(f"{'':<18}{'seconds':>9}{'tokens/s':>11}{'TFLOP/s':>9}{'of ceiling':>12}{'MFU':>7}{'peak GiB':>10}")
    for name in PASSES:
        row = result[name]
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.0%}"
        print(
            f"{name:<18}{row['seconds']:>9.3f}{row['tokens_per_s']:>11.0f}{row['tflops']:>9.3g}"
            f"{row['share_of_ceiling']:>12.0%}{mfu:>7}{row['peak_gib']:>10.1f}"
        )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="3b")
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
    parser.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="recompute activations in backward; without it, 16,384 tokens of the 3B shape save 75 GiB",
    )
    parser.add_argument(
        "--weights",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="dtype of the stored weights; auto takes the larger one that fits the device",
    )
    parser.add_argument("--optimizer", choices=("auto", *OPTIMIZERS), default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--matmul-size", type=int, default=8192)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--tiny", action="store_true", help="test that it runs, in seconds on CPU; the speed means nothing"
    )
    if parser.parse_known_args(arguments)[0].tiny:
        parser.set_defaults(**TINY)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_arguments()
    device = torch.device(resolve_device(options.device))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            backend_of(device.type).groups,
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
