# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs on meta tensors, and the choice among kernels with one that the test registers."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.plain_attention import PlainKernel
from verl.distributed.backends import BACKENDS
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import SequenceGroup, shard_plan
from verl.models.attention import varlen_kernels
from verl.models.attention.kernels import AttentionRule
from verl.models.attention.layouts import Blocks, PackedLayout
from verl.models.attention.partial_attention import (
    AttentionCall,
    Span,
    merge,
    partial_backward,
    partial_forward,
)
from verl.models.attention.sequence_parallel_layouts import RingLayout
from verl.models.attention.varlen_kernels import (
    KernelChoice,
    TorchKernel,
    VarlenKernel,
    choose_kernels,
    use_kernels,
)

RULE = AttentionRule(0.3)
GROUPS = [(5, [2, 3, 0, 4]), (1, [1]), (7, []), (3, [2, 2, 2])]


@pytest.fixture
def meta_gpu(monkeypatch):
    """Make the meta device a GPU: shapes without values."""
    monkeypatch.setitem(BACKENDS, "meta", replace(BACKENDS["cuda"], name="meta"))


class Record(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls.append((function.overloadpacket.__name__, args, kwargs or {}, out))
        return out

    def arguments(self, name):
        """Arguments of each call of an operator, by the names of its schema."""
        schema = getattr(torch.ops.aten, name).default._schema.arguments
        names = [argument.name for argument in schema]
        return [dict(zip(names, args)) | kwargs for call, args, kwargs, _ in self.calls if call == name]  # noqa: B905


def meta_tensors(size, heads=8, kv_heads=2, dim=16):
    shapes = [(1, count, size, dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("rule", [RULE, AttentionRule(0.3, window=4), AttentionRule(0.3, is_causal=False)])
def test_grouped_heads_are_neither_repeated_nor_copied_on_a_gpu(rule, meta_gpu):
    layout = PackedLayout.of(torch.tensor([0, 3, 10]), "meta")
    inputs = meta_tensors(10)

    with Record() as record:
        out = layout.attend(*inputs, rule)
        grads = torch.autograd.grad(out, inputs, torch.empty_like(out))

    (forward,) = record.arguments("_flash_attention_forward")
    (backward,) = record.arguments("_flash_attention_backward")
    assert forward["key"].shape == forward["value"].shape == backward["key"].shape == (10, 2, 16)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in inputs]
    copies = {"clone", "repeat", "_to_copy", "copy_", "sum", "expand", "index_select", "repeat_interleave"}
    copied = [args[0].shape for name, args, _, _ in record.calls if name in copies]
    assert set(copied) <= {(10, 8, 16)}  # the queries, not keys or values
    assert len(copied) <= 2


def test_a_window_on_a_gpu_counts_the_own_key_and_is_left_out_where_it_has_no_effect(meta_gpu):
    layout, seen = PackedLayout.of(torch.tensor([0, 3, 10]), "meta"), []
    for rule in (RULE, AttentionRule(0.3, window=4), AttentionRule(0.3, window=7), AttentionRule(0.3, False)):
        with Record() as record:
            layout.attend(*meta_tensors(10), rule)
        (call,) = record.arguments("_flash_attention_forward")
        seen.append((call["is_causal"], call["window_size_left"], call["window_size_right"]))

    assert seen == [(True, -1, 0), (False, 3, 0), (True, -1, 0), (False, -1, -1)]


def test_a_block_on_a_gpu_is_a_window_from_the_own_key_to_the_last(meta_gpu):
    layout = PackedLayout.of(torch.tensor([0, 3, 10]), "meta", Blocks(((1, 3), (4, 9))))

    with Record() as record:
        out = layout.attend(*(inputs := meta_tensors(10)), RULE)
        torch.autograd.grad(out, inputs, torch.empty_like(out))

    for name in ("_flash_attention_forward", "_flash_attention_backward"):
        calls = record.arguments(name)
        windows = [(call["is_causal"], call["window_size_left"], call["window_size_right"]) for call in calls]
        assert windows == [(True, -1, 0), (False, 0, -1)]
        assert [len(call["query"]) for call in calls] == [10, 7]  # tokens 1 to 7, and keys 2 to 8
        assert calls[1]["max_q"] == calls[1]["max_k"] == 4


def test_a_shared_prompt_under_a_window_takes_one_call_with_more_keys_than_queries_on_a_gpu(meta_gpu):
    layout = PackedLayout.of_groups([(5, [2, 3])], "meta")

    with Record() as record:
        layout.attend(*meta_tensors(10), AttentionRule(0.3, window=3))

    (call,) = record.arguments("_flash_attention_forward")
    assert (call["is_causal"], call["window_size_left"], call["window_size_right"]) == (False, 2, 0)
    assert call["query"].shape[0] == 10 and call["key"].shape[:2] == (12, 2)  # two tokens of the prompt twice


def test_rows_of_one_query_are_announced_as_two(meta_gpu):
    # With at most one query in every row the kernel would rearrange grouped heads, which needs all rows full.
    q, k, v = (
        torch.empty(n, h, 16, dtype=torch.bfloat16, device="meta") for n, h in ((1, 8), (9, 2), (9, 2))
    )
    call = AttentionCall.of(*Span.of_all([(0, [1, 0]), (0, [5, 4])], "meta"), is_causal=False)

    with Record() as record:
        out, lse = partial_forward(q, k, v, call.rows(RULE))
        partial_backward(out, q, k, v, out, lse, call.rows(RULE))

    for name in ("_flash_attention_forward", "_flash_attention_backward"):
        (arguments,) = record.arguments(name)
        assert (arguments["max_q"], arguments["max_k"]) == (2, 5)


def test_a_soft_cap_on_a_gpu_multiplies_in_half_precision_and_adds_in_float32(meta_gpu):
    layout, inputs = PackedLayout.of(torch.tensor([0, 3, 10]), "meta"), meta_tensors(10)

    with Record() as record:
        out = layout.attend(*inputs, AttentionRule(0.3, softcap=2.0))
        grads = torch.autograd.grad(out, inputs, torch.empty_like(out))

    assert [grad.shape for grad in grads] == [tensor.shape for tensor in inputs]
    products = [(args, out) for name, args, _, out in record.calls if name == "bmm"]
    assert {factor.dtype for args, _ in products for factor in args[:2]} == {torch.bfloat16}
    assert {out.dtype for _, out in products} == {torch.float32}
    assert not [name for name, *_ in record.calls if name.startswith("_flash")]


@pytest.fixture
def plain_kernel():
    kernel = PlainKernel()
    previous = use_kernels(KernelChoice((kernel,), is_required=True))
    yield kernel
    use_kernels(previous)


def tensors(size):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, size, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def with_gradients(layout, inputs, rule):
    out = layout.attend(*inputs, rule)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize(
    ("layout", "rule", "calls"),
    [
        (PackedLayout.of(torch.tensor([0, 3, 3, 10])), RULE, 1),
        (PackedLayout.of(torch.tensor([0, 3, 3, 10])), AttentionRule(0.3, is_causal=False), 1),
        (PackedLayout.of(torch.tensor([0, 3, 3, 10])), AttentionRule(0.3, window=2, softcap=0.5), 1),
        (PackedLayout.of_groups(GROUPS), RULE, 3),
        (PackedLayout.of_groups(GROUPS), AttentionRule(0.3, softcap=0.5), 3),
    ],
)
def test_layouts_compute_the_same_through_any_kernel(layout, rule, calls, plain_kernel):
    size = layout.calls[0].queries.tokens.stop
    inputs = tensors(size)
    ours = with_gradients(layout, inputs, rule)
    use_kernels(varlen_kernels.DEFAULT)

    theirs = with_gradients(layout, inputs, rule)

    assert plain_kernel.calls == ["forward"] * calls + ["backward"] * calls
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_calls_of_a_ring_merge_to_the_same_through_any_kernel(softcap, plain_kernel):
    rule, groups = AttentionRule(0.3, softcap=softcap), [SequenceGroup(*group) for group in GROUPS]
    ranks = [SequenceParallel(1, 3, index=index) for index in range(3)]
    plans = [shard_plan(groups, sp) for sp in ranks]
    q, k, v = (tensor.detach()[0].transpose(0, 1) for tensor in tensors(len(plans[0].positions)))
    results = []
    for kernels in (None, varlen_kernels.DEFAULT):
        if kernels is not None:
            use_kernels(kernels)
        for plan, sp in zip(plans, ranks, strict=True):
            out, lse = torch.zeros(len(plan.local), 4, 8), torch.full((4, len(plan.local)), -torch.inf)
            for other, calls in zip(plans, RingLayout.of(plan, sp).calls, strict=True):
                for call in calls:
                    at, keys = plan.local[call.queries.tokens], other.local[call.keys.tokens]
                    part = partial_forward(q[at], k[keys], v[keys], call.rows(rule))
                    tokens = call.queries.tokens
                    out[tokens], lse[:, tokens] = merge(out[tokens], lse[:, tokens], *part)
            results.append(out)

    assert set(plain_kernel.calls) == {"forward"}
    for left, right in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(left, right, atol=2e-6, rtol=1e-5)


class EqualHeads(VarlenKernel):
    """Takes values as wide as keys, as kernels for GPUs do."""

    name = "equal heads"

    def __init__(self):
        self.plain = PlainKernel()

    def obstacle(self, q, v, softcap):
        return None

    def run(self, q, k, v, rows):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        return self.plain.forward(q, k, v, rows)

    def gradients(self, tensors, rows):
        grad_out, q, k, v, out, lse = tensors
        assert grad_out.shape[-1] == k.shape[-1] == v.shape[-1] == out.shape[-1]
        return self.plain.backward(grad_out, q, k, v, out, lse, rows)


def test_values_that_are_narrower_than_keys_give_the_same_with_columns_of_zeros():
    # As in latent attention, whose heads have 192 and 128 dimensions.
    generator, packed = torch.Generator().manual_seed(0), PackedLayout.of_groups(GROUPS, "cpu")
    size = sum(prompt + sum(responses) for prompt, responses in GROUPS)
    inputs = [torch.randn(1, 4, size, dim, generator=generator, requires_grad=True) for dim in (24, 24, 16)]
    found = []
    for kernels in ((TorchKernel(),), (EqualHeads(),)):  # the first takes no CPU: plain products
        previous = use_kernels(KernelChoice(kernels))
        try:
            out = packed.attend(*inputs, RULE)
        finally:
            use_kernels(previous)
        found.append((out, *torch.autograd.grad(out, inputs, torch.sin(out.detach()))))

    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


def test_a_required_kernel_that_cannot_take_the_model_is_an_error(meta_gpu):
    previous = use_kernels(KernelChoice((TorchKernel(),), is_required=True))
    wide = [torch.empty(1, 2, 10, 320, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    layout = PackedLayout.of(torch.tensor([0, 10]), "meta")

    try:
        with pytest.raises(
            NotImplementedError, match=r"torch needs heads of keys with .* up to 256 dimensions, .* not 320"
        ):
            layout.attend(*wide, RULE)
        narrow = (*(tensor[..., :64] for tensor in wide[:2]), wide[2][..., :72])
        with pytest.raises(NotImplementedError, match=r"values with at most as many, not 64 and 72"):
            layout.attend(*narrow, RULE)
        with pytest.raises(
            NotImplementedError, match=r"in torch.float32.*set `worker.actor.attention_kernel`"
        ):
            layout.attend(*(tensor[..., :64].float() for tensor in wide), RULE)
        with pytest.raises(NotImplementedError, match="torch has no soft cap"):
            layout.attend(*(tensor[..., :64] for tensor in wide), AttentionRule(0.3, softcap=2.0))
    finally:
        use_kernels(previous)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_without_a_gpu_the_choice_is_the_kernel_inside_of_torch(name):
    choice = choose_kernels(name, torch.device("cpu"))

    assert [kernel.name for kernel in choice.kernels] == ["torch"] and not choice.is_required


def test_flash_attention_on_the_cpu_is_refused():
    with pytest.raises(
        RuntimeError, match=r"`worker.actor.attention_kernel` \(flash\) needs a GPU, not the cpu"
    ):
        choose_kernels("flash", torch.device("cpu"))
