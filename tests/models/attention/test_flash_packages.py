# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's packages, replaced by modules that have their signatures and compute plain attention.

The signatures are those of flash-attn 2.8, of the operators that flash-attn-3 registers, and of
`flash_attn.cute` in flash-attn-4.
"""

import logging
import sys
from types import ModuleType

import pytest
import torch

from tests.helpers.plain_attention import PlainKernel
from verl.models.attention import varlen_kernels
from verl.models.attention.kernels import AttentionRule, RowRun, Rows
from verl.models.attention.layouts import Blocks, PackedLayout
from verl.models.attention.varlen_kernels import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    KernelChoice,
    choose_kernels,
    select_kernels,
    use_kernels,
)

PLAIN = PlainKernel()
GROUPS = [(5, [2, 3, 0, 4]), (1, [1]), (7, []), (3, [2, 2, 2])]
BLOCKS = Blocks(((1, 3), (3, 5), (17, 22)))


def rows_of(cu_q, cu_k, longest, scale, is_causal, before, after, softcap):
    """Read the arguments of a flash kernel as its documentation says."""
    most_q, most_k = (int(cu.diff().max()) for cu in (cu_q, cu_k))
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert longest[0] in (most_q, 2) and longest[1] == most_k
    before, after = (-1 if size is None else size for size in (before, after))
    if is_causal:
        assert after in (-1, 0)
        after = 0
    runs = (RowRun(0, 0, 1, most_q, most_k),)
    window = [size if size >= 0 else None for size in (before, after)]
    return Rows(cu_q, cu_k, runs, (most_q, most_k), scale, *window, softcap or None)


def infinite_without_keys(out, lse):
    return out, lse.masked_fill(lse == float("-inf"), float("inf"))  # as FlashAttention 2 does


def fill(grads, values):
    for grad, value in zip(grads, values, strict=True):
        assert grad.is_contiguous()
        grad.copy_(value)


def flash_attn_2():
    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == 0.0 and alibi_slopes is None
        longest, window = (max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
        rows = rows_of(cu_seqlens_q, cu_seqlens_k, longest, softmax_scale, causal, *window, softcap)
        return *infinite_without_keys(*PLAIN.forward(q, k, v, rows)), None, torch.zeros(2)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        deterministic, rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == 0.0 and alibi_slopes is None and deterministic is False
        longest, window = (max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
        rows = rows_of(cu_seqlens_q, cu_seqlens_k, longest, softmax_scale, causal, *window, softcap)
        fill((dq, dk, dv), PLAIN.backward(dout, q, k, v, out, softmax_lse, rows))
        return torch.zeros(())

    package = ModuleType("flash_attn.flash_attn_interface")
    package._flash_attn_varlen_forward = _flash_attn_varlen_forward
    package._flash_attn_varlen_backward = _flash_attn_varlen_backward
    return {"flash_attn": ModuleType("flash_attn"), "flash_attn.flash_attn_interface": package}


def flash_attn_4():
    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
        causal=False, softcap=None, window_size_left=None, window_size_right=None, *, return_lse=False,
    ):  # fmt: skip
        assert return_lse
        assert window_size_left is None or window_size_left >= 0
        longest, window = (max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
        rows = rows_of(cu_seqlens_q, cu_seqlens_k, longest, softmax_scale, causal, *window, softcap)
        return *PLAIN.forward(q, k, v, rows), None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None,
    ):  # fmt: skip
        longest, window = (max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
        rows = rows_of(cu_seqlens_q, cu_seqlens_k, longest, softmax_scale, causal, *window, softcap)
        fill((dq, dk, dv), PLAIN.backward(dout, q, k, v, out, lse, rows))
        return dq, dk, dv

    package = ModuleType("flash_attn.cute.interface")
    package._flash_attn_fwd, package._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    names = ("flash_attn", "flash_attn.cute")
    return {name: ModuleType(name) for name in names} | {"flash_attn.cute.interface": package}


FA3_FORWARD = """fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None,
Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,
Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None,
int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None,
Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None,
Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False,
int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0.0,
bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None,
int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"""
FA3_BACKWARD = """bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None,
Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None,
int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,
int window_size_right=-1, float softcap=0.0, bool deterministic=False, int sm_margin=0)
-> (Tensor, Tensor, Tensor, Tensor, Tensor)"""


def flash_attn_3():
    def fwd(
        q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
        seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
        is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        assert num_splits == 1
        longest, window = (max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
        rows = rows_of(cu_seqlens_q, cu_seqlens_k, longest, softmax_scale, is_causal, *window, softcap)
        return *PLAIN.forward(q, k, v, rows), torch.zeros(0), torch.zeros(0)

    def bwd(
        dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None, cu_seqlens_k=None,
        seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False,
        sm_margin=0,
    ):  # fmt: skip
        longest, window = (max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
        rows = rows_of(cu_seqlens_q, cu_seqlens_k, longest, softmax_scale, is_causal, *window, softcap)
        fill((dq, dk, dv), PLAIN.backward(dout, q, k, v, out, softmax_lse, rows))
        return tuple(torch.zeros(0) for _ in range(5))

    library = torch.library.Library("flash_attn_3", "DEF")
    for schema, function in ((FA3_FORWARD, fwd), (FA3_BACKWARD, bwd)):
        library.define(" ".join(schema.split()))
        library.impl(schema[:3], function, "CPU")
    module = ModuleType("flash_attn_interface")
    module.library = library  # keeps the operators registered
    return {"flash_attn_interface": module}


KERNELS = [(FlashAttention2, flash_attn_2), (FlashAttention3, flash_attn_3), (FlashAttention4, flash_attn_4)]


@pytest.fixture(params=KERNELS, ids=lambda param: param[0].__name__)
def package_kernel(request, monkeypatch):
    """A package's kernel in use, which takes tensors on the CPU."""
    kernel_type, modules = request.param
    found = modules()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernel_type, "obstacle", lambda *args: None)
    previous = use_kernels(KernelChoice((kernel_type(),), is_required=True))
    yield
    use_kernels(previous)
    for module in found.values():
        if hasattr(module, "library"):
            module.library._destroy()


def with_gradients(layout, inputs, rule):
    out = layout.attend(*inputs, rule)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (PackedLayout.of(torch.tensor([0, 3, 3, 23])), AttentionRule(0.3)),
        (PackedLayout.of(torch.tensor([0, 3, 3, 23])), AttentionRule(0.3, is_causal=False)),
        (PackedLayout.of(torch.tensor([0, 3, 3, 23])), AttentionRule(0.3, window=4)),
        (PackedLayout.of(torch.tensor([0, 3, 3, 23])), AttentionRule(0.3, window=1, softcap=0.5)),
        (PackedLayout.of_groups(GROUPS), AttentionRule(0.3)),
        (PackedLayout.of_groups(GROUPS), AttentionRule(0.3, window=9, softcap=0.5)),
        (PackedLayout.of_groups([(5, [1, 1]), (4, [0, 1])]), AttentionRule(0.3)),
        (PackedLayout.of_groups(GROUPS), AttentionRule(0.3, window=3)),
        (PackedLayout.of_groups(GROUPS), AttentionRule(0.3, chunk=3)),
        (PackedLayout.of_groups(GROUPS, blocks=BLOCKS), AttentionRule(0.3, window=3)),
        (PackedLayout.of(torch.tensor([0, 3, 3, 23]), blocks=BLOCKS), AttentionRule(0.3, softcap=0.5)),
    ],
)
def test_a_package_gets_its_arguments_in_its_own_order_and_meaning(layout, rule, package_kernel):
    size = layout.calls[0].queries.tokens.stop
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, size, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    ours = with_gradients(layout, inputs, rule)
    use_kernels(varlen_kernels.DEFAULT)

    theirs = with_gradients(layout, inputs, rule)

    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=2e-6, rtol=1e-5)


def installed(monkeypatch, names, capability, version="2.8.3.post1"):
    """Pretend that some of the kernels' packages are installed, on a GPU of a compute capability."""
    for kernel in varlen_kernels.PACKAGES:
        monkeypatch.setattr(kernel, "__init__", lambda self: None)
    specs = {"flash-attn 2": "flash_attn_2_cuda", "flash-attn 3": "flash_attn_interface"}
    present = {specs[name] for name in names if name in specs}
    monkeypatch.setattr(varlen_kernels.importlib.util, "find_spec", lambda name: name in present or None)
    monkeypatch.setattr(varlen_kernels.importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("option", "packages", "capability", "expected"),
    [
        ("auto", [], (9, 0), ["torch"]),
        ("auto", ["flash-attn 3"], (9, 0), ["flash-attn 3", "torch"]),
        ("auto", ["flash-attn 3", "flash-attn 2"], (8, 0), ["torch", "flash-attn 2"]),
        ("torch", ["flash-attn 3", "flash-attn 2"], (9, 0), ["torch"]),
        ("flash", ["flash-attn 3", "flash-attn 2"], (9, 0), ["flash-attn 3"]),
        ("flash", ["flash-attn 3", "flash-attn 2"], (10, 0), ["flash-attn 2"]),
    ],
)
def test_the_choice_follows_the_option_the_packages_and_the_gpu(
    option, packages, capability, expected, monkeypatch
):
    installed(monkeypatch, packages, capability)

    choice = choose_kernels(option, torch.device("cuda"))

    assert [kernel.name for kernel in choice.kernels] == expected
    assert choice.is_required == (option == "flash")


def test_flash_without_a_package_for_the_gpu_names_what_to_install(monkeypatch):
    installed(monkeypatch, ["flash-attn 3"], (8, 9))

    with pytest.raises(RuntimeError) as error:
        choose_kernels("flash", torch.device("cuda"))

    assert str(error.value) == (
        "`worker.actor.attention_kernel` (flash) finds no FlashAttention for this GPU: flash-attn 3 needs"
        " compute capability 9.0; flash-attn is not installed (pip install flash-attn --no-build-isolation);"
        " flash-attn-4 is not installed (pip install flash-attn-4); install one, or set it to auto"
    )


def test_an_old_flash_attn_is_left_out_by_name(monkeypatch):
    installed(monkeypatch, ["flash-attn 2"], (8, 0), version="2.6.3")

    assert [kernel.name for kernel in choose_kernels("auto", torch.device("cuda")).kernels] == ["torch"]
    with pytest.raises(RuntimeError, match=r"flash-attn 2\.6\.3 is too old"):
        choose_kernels("flash", torch.device("cuda"))


def test_the_selected_kernels_are_those_of_the_process_and_are_logged(monkeypatch, caplog):
    installed(monkeypatch, ["flash-attn 3"], (9, 0))
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)
    previous = use_kernels(varlen_kernels.DEFAULT)

    with caplog.at_level("INFO"):
        select_kernels("auto", torch.device("cuda"))
    selected = use_kernels(previous)

    assert [kernel.name for kernel in selected.kernels] == ["flash-attn 3", "torch"]
    assert "attention kernels: flash-attn 3, torch" in caplog.text
