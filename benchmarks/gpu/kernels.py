# SPDX-License-Identifier: Apache-2.0
"""Attention and head kernels against plain computations: equality, then time.

    python -m benchmarks.gpu.kernels --models FOLDER [--tiny --device cpu]

Needs torch and transformers only.
"""

import unittest.mock
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.part import Place, Report, largest_difference, run_part
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import SequenceGroup, ShardPlan, shard_plan
from verl.models import fused_log_probs
from verl.models.attention.kernels import AttentionRule
from verl.models.attention.layouts import Layout, PackedLayout
from verl.models.attention.partial_attention import (
    AttentionCall,
    Span,
    add_attention,
    add_gradients,
    attend_calls,
)
from verl.models.attention.sequence_parallel_layouts import RingLayout
from verl.models.attention.varlen_kernels import PACKAGES, KernelChoice, TorchKernel, use_kernels
from verl.models.fused_log_probs import linear_log_probs, softmax_for
from verl.models.head.eager_softmax import EagerSoftmax
from verl.models.head.logit_chunks import HeadLogits

RING = 4


@dataclass(frozen=True)
class Sizes:
    """Sizes of the timed problems: those of a 7B model, or tiny."""

    tokens: int = 16384  # of a micro batch
    row: int = 2048
    heads: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    group: tuple[int, int, int, int] = (3, 512, 5, 900)  # prompts, their tokens, responses, their tokens
    ring: tuple[SequenceGroup, ...] = (
        SequenceGroup(3000, (901, 800)), SequenceGroup(2222), SequenceGroup(7),
    )  # fmt: skip
    hidden: int = 3584
    vocabulary: int = 152064
    checked_tokens: int = 256  # whose logits are held for the comparison
    head_tokens: int = 12288

    @property
    def rule(self) -> AttentionRule:
        return AttentionRule(self.head_dim**-0.5)


TINY = Sizes(
    tokens=64, row=16, heads=4, kv_heads=2, head_dim=16, group=(2, 8, 2, 4), hidden=32, vocabulary=500,
    ring=(SequenceGroup(30, (9, 8)), SequenceGroup(17)), checked_tokens=16, head_tokens=64,
)  # fmt: skip


def attention_inputs(place: Place, sizes: Sizes, length: int) -> list[Tensor]:
    """Queries, keys and values, (1, heads, length, D)."""
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    tensors = [place.random(1, count, length, sizes.head_dim, seed=seed) for seed, count in enumerate(heads)]
    return [tensor.requires_grad_() for tensor in tensors]


def boundaries(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def with_gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """The output of attention, and the gradients of its weighted sum."""
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def grouped_heads(report: Report, place: Place, sizes: Sizes) -> None:
    """Fewer key heads than query heads give what repeated key heads give."""
    layout = PackedLayout.of(boundaries([sizes.row] * (sizes.tokens // sizes.row)), place.device)
    inputs = attention_inputs(place, sizes, sizes.tokens)
    weights = place.random(1, sizes.tokens, sizes.heads, sizes.head_dim, seed=3)
    repeats = sizes.heads // sizes.kv_heads

    def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return layout.attend(query, key, value, sizes.rule)

    def repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return grouped(query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))

    results = [with_gradients(attend, inputs, weights) for attend in (grouped, repeated)]
    report.at_most("grouped heads equal repeated heads", largest_difference(*results), place.tolerance)
    pairs = sizes.tokens * (sizes.row + 1) / 2
    for name, attend in (("grouped", grouped), ("repeated", repeated)):
        seconds = place.seconds(lambda attend=attend: with_gradients(attend, inputs, weights))
        report.figure(f"attention_{name}_heads_s", seconds)
        flops = 3.5 * 4 * pairs * sizes.heads * sizes.head_dim  # the backward pass computes the scores again
        report.figure(f"attention_{name}_heads_tflops", flops / seconds / 1e12)


def attention_kernels(report: Report, place: Place, sizes: Sizes) -> None:
    """Each installed package's kernels give what torch's give, in a pack and behind shared prompts."""
    lengths = [sizes.row] * (sizes.tokens // sizes.row)
    packed = PackedLayout.of(boundaries(lengths), place.device)
    shared = PackedLayout.of_groups([(sizes.row // 2, [sizes.row // 4] * 2)] * len(lengths), place.device)
    inputs = attention_inputs(place, sizes, sizes.tokens)
    weights = place.random(1, sizes.tokens, sizes.heads, sizes.head_dim, seed=3)
    expected: dict[str, list[Tensor]] = {}
    for name, choice in installed_kernels(place).items():
        previous = use_kernels(choice)
        try:
            for pattern, layout in (("packed", packed), ("shared", shared)):

                def step(layout: Layout = layout) -> list[Tensor]:
                    return with_gradients(
                        lambda *tensors: layout.attend(*tensors, sizes.rule), inputs, weights
                    )

                found = step()
                gap = largest_difference(found, expected.setdefault(pattern, found))
                report.at_most(f"{name} kernels equal torch's, {pattern}", gap, place.tolerance)
                report.figure(f"attention_{name}_{pattern}_s", place.seconds(step))
        finally:
            use_kernels(previous)


def installed_kernels(place: Place) -> dict[str, KernelChoice]:
    """Torch's kernels, then those of each package that supports the GPU."""
    choices = {"torch": KernelChoice((TorchKernel(),))}
    if place.device.type == "cuda":
        capability = torch.cuda.get_device_capability(place.device)
        installed = [package for package in PACKAGES if package.problem(capability) is None]
        choices |= {package.name: KernelChoice((package(),), is_required=True) for package in installed}
    return choices


def shared_prompts(report: Report, place: Place, sizes: Sizes) -> None:
    """Responses behind one copy of their prompt give what they give behind a copy each."""
    prompts, prompt, n, response = sizes.group
    lengths = [prompt + n * response] * prompts
    shared = PackedLayout.of_groups([(prompt, [response] * n)] * prompts, place.device)
    repeated = PackedLayout.of(boundaries([prompt + response] * (prompts * n)), place.device)
    inputs = attention_inputs(place, sizes, sum(lengths))
    order = torch.cat([
        torch.cat([torch.arange(start, start + prompt), torch.arange(first, first + response)])
        for start in (0, *accumulate(lengths[:-1]))
        for first in range(start + prompt, start + lengths[0], response)
    ]).to(place.device)  # fmt: skip
    # Of a prompt's copies, whose outputs are equal, only the first counts.
    counts = torch.zeros(len(order), dtype=torch.bool).view(prompts, n, -1)
    counts[:, 0], counts[:, 1:, prompt:] = True, True
    counts = counts.flatten().to(place.device)
    weights = place.random(1, sum(lengths), sizes.heads, sizes.head_dim, seed=3)

    def attend(layout: Layout, *tensors: Tensor) -> Tensor:
        return layout.attend(*tensors, sizes.rule)

    def attend_repeated(*tensors: Tensor) -> Tensor:
        out = attend(repeated, *(tensor[:, :, order] for tensor in tensors))
        return torch.zeros_like(weights).index_copy(1, order[counts], out[:, counts])

    found = with_gradients(lambda *tensors: attend(shared, *tensors), inputs, weights)
    expected = with_gradients(attend_repeated, inputs, weights)
    gap = largest_difference(found, expected)
    # Gradients of the copies are summed in half precision.
    report.at_most("shared prompts equal repeated prompts", gap, 2 * place.tolerance)
    copies = [tensor[:, :, order].detach().requires_grad_() for tensor in inputs]
    for name, layout, tensors, scale in (
        ("shared", shared, inputs, weights),
        ("repeated", repeated, copies, weights[:, order]),
    ):
        step = lambda layout=layout, tensors=tensors, scale=scale: with_gradients(  # noqa: E731
            lambda *given: attend(layout, *given), tensors, scale
        )
        report.figure(f"attention_{name}_prompts_s", place.seconds(step))


def ring_of_four(report: Report, place: Place, sizes: Sizes) -> None:
    """The partial kernels of four ring ranks, called in one process, give attention over the whole."""
    ranks = [SequenceParallel(ring_size=RING, index=index) for index in range(RING)]
    plans = [shard_plan(sizes.ring, rank) for rank in ranks]
    layouts = [RingLayout.of(plan, rank, place.device) for plan, rank in zip(plans, ranks, strict=True)]
    whole = PackedLayout.of_groups([(group.prompt, group.responses) for group in sizes.ring], place.device)
    inputs = [
        tensor[0].transpose(0, 1).detach()
        for tensor in attention_inputs(place, sizes, len(plans[0].positions))
    ]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    weights = place.random(*inputs[0].shape, seed=3)

    expected = with_gradients(
        lambda *tensors: attend_calls(*tensors, whole.calls, sizes.rule), leaves, weights
    )
    found = attend_in_ring(inputs, weights, plans, layouts, sizes.rule)
    report.at_most("a ring of four equals one rank", largest_difference(found, expected), place.tolerance)


def attend_in_ring(
    inputs: Sequence[Tensor],  # (N, heads, D): queries, keys, values
    weights: Tensor,
    plans: Sequence[ShardPlan],
    layouts: Sequence[RingLayout],
    rule: AttentionRule,
) -> list[Tensor]:
    """Output and gradients of all ranks of a ring, which read each other's keys directly."""
    device = inputs[0].device
    results = [torch.zeros(tensor.shape, device=device) for tensor in (inputs[0], *inputs)]
    for plan, layout in zip(plans, layouts, strict=True):
        mine, kept = plan.local.to(device), ~plan.is_padding.to(device)
        query = inputs[0][mine]
        out = torch.zeros(query.shape, device=query.device)
        lse = torch.full((query.shape[1], len(query)), float("-inf"), device=query.device)
        sources = [(plans[rank].local.to(device), calls) for rank, calls in enumerate(layout.calls)]
        for theirs, calls in sources:
            for call in calls:
                add_attention(out, lse, call, query, inputs[1][theirs], inputs[2][theirs], rule)
        results[0][mine[kept]] = out[kept]
        out, grad_query = out.to(query.dtype), torch.zeros(query.shape, device=query.device)
        for theirs, calls in sources:
            key, value = inputs[1][theirs], inputs[2][theirs]
            grads = [grad_query, *(torch.zeros(key.shape, device=key.device) for _ in range(2))]
            for call in calls:
                add_gradients(grads, call, weights[mine], (query, key, value, out, lse), rule)
            for total, part in zip(results[2:], grads[1:], strict=True):
                total.index_add_(0, theirs, part)
        results[1][mine[kept]] = grad_query[kept]
    return results


def single_queries(report: Report, place: Place, sizes: Sizes) -> None:
    """Rows of at most one query, one of them empty, under grouped heads."""
    call = AttentionCall.of(*Span.of_all([(0, [1, 0]), (0, [5, 4])], place.device), is_causal=False)
    inputs = [
        place.random(length, heads, sizes.head_dim, seed=seed).requires_grad_()
        for seed, (length, heads) in enumerate(((1, sizes.heads), (9, sizes.kv_heads), (9, sizes.kv_heads)))
    ]
    weights = place.random(*inputs[0].shape, seed=3)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (
            tensor[:5].repeat_interleave(sizes.heads // sizes.kv_heads, 1) for tensor in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query, key) * sizes.rule.scale
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)

    found = with_gradients(lambda *tensors: attend_calls(*tensors, [call], sizes.rule), inputs, weights)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    expected = with_gradients(plain, exact, weights.float())
    report.at_most("rows of one query and of none", largest_difference(found, expected), place.tolerance)


def head_inputs(place: Place, sizes: Sizes, tokens: int) -> tuple[list[Tensor], Tensor]:
    hidden = place.random(tokens, sizes.hidden, scale=0.5)
    weight = place.random(sizes.vocabulary, sizes.hidden, seed=1, scale=2 * sizes.hidden**-0.5)
    targets = torch.randint(sizes.vocabulary, (tokens,), generator=torch.Generator().manual_seed(2))
    return [hidden.requires_grad_(), weight.requires_grad_()], targets.to(place.device)


def fused_head(inputs: Sequence[Tensor], targets: Tensor) -> list[Tensor]:
    """Log-probs, entropy, and gradients of their sum."""
    result = linear_log_probs(HeadLogits(*inputs), targets, with_entropy=True)
    assert result.entropy is not None, "it was requested"
    grads = torch.autograd.grad(result.log_probs.sum() + result.entropy.sum(), inputs)
    return [result.log_probs.detach(), result.entropy.detach(), *grads]


def head_values(report: Report, place: Place, sizes: Sizes) -> None:
    """Log-probs and entropy in chunks, and their gradients, equal those of all logits in float32."""
    inputs, targets = head_inputs(place, sizes, sizes.checked_tokens)
    found = fused_head(inputs, targets)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    log_p = F.log_softmax(exact[0] @ exact[1].t(), -1)
    log_probs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    expected = [log_probs, entropy, *torch.autograd.grad(log_probs.sum() + entropy.sum(), exact)]
    names = (
        "log-probs of the head",
        "entropy of the head",
        "gradient of hidden states",
        "gradient of the head",
    )
    for name, one, other in zip(names, found, expected, strict=True):
        report.at_most(name, largest_difference([one], [other.detach()]), place.tolerance)


def head_time(report: Report, place: Place, sizes: Sizes) -> None:
    """Seconds of the head, with its kernels and with torch operations, next to those of its product alone."""
    inputs, targets = head_inputs(place, sizes, sizes.head_tokens)
    hidden, weight = (tensor.detach() for tensor in inputs)
    rows = max(1, (1 << 28) // sizes.vocabulary)  # of logits that fit

    def forward() -> None:
        with torch.no_grad():
            linear_log_probs(HeadLogits(*inputs), targets)

    def product() -> None:
        for part in hidden.split(rows):
            torch.mm(part, weight.t())

    product_s = place.seconds(product, 3)
    report.figure("head_product_s", product_s)
    for name, softmax in (("head", softmax_for(place.device.type)), ("eager_head", EagerSoftmax())):
        with unittest.mock.patch.object(fused_log_probs, "softmax_for", lambda _, one=softmax: one):
            forward_s = place.seconds(forward, 3)
            update_s = place.seconds(lambda: fused_head(inputs, targets), 3)
        report.figure(f"{name}_log_probs_s", forward_s)
        report.figure(f"{name}_log_probs_over_product", forward_s / product_s)
        report.figure(f"{name}_update_s", update_s)
        report.figure(f"{name}_update_over_product", update_s / product_s)


def head_softmax(report: Report, place: Place, sizes: Sizes) -> None:
    """The device's kernels of the head give what torch operations give."""
    inputs, targets = head_inputs(place, sizes, sizes.checked_tokens)
    report.figure("head_softmax", type(softmax_for(place.device.type)).__name__)
    found = fused_head(inputs, targets)
    with unittest.mock.patch.object(fused_log_probs, "softmax_for", lambda _: EagerSoftmax()):
        expected = fused_head(inputs, targets)
    gap = largest_difference(found, expected)
    report.at_most("kernels of the head equal torch operations", gap, place.tolerance)


ATTENTION_STEPS = (grouped_heads, attention_kernels, shared_prompts, ring_of_four, single_queries)
HEAD_STEPS = (head_values, head_softmax, head_time)


def work(report: Report, place: Place, case: str) -> None:
    sizes = TINY if place.tiny else Sizes()
    for step in ATTENTION_STEPS + HEAD_STEPS:
        report.attempt(step, place, sizes)


if __name__ == "__main__":
    run_part(__doc__, work, ("all",))
