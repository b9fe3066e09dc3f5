# SPDX-License-Identifier: Apache-2.0
"""Choice of the head's softmax, and its Triton kernels: interpreted, compiled, and the memory around them.

`head_kernel_laws.py` holds the laws of the kernels' numbers; `tests/gpu` runs them on CUDA.
"""

import importlib.util
import logging
import os
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.architecture.source import ROOT
from verl.distributed.backends import BACKENDS
from verl.models.fused_log_probs import linear_kl, linear_log_probs, softmax_for
from verl.models.head import eager_softmax, triton_softmax
from verl.models.head.eager_softmax import EagerSoftmax, HeadProducts, LogProbStatistics
from verl.models.head.logit_chunks import HeadLogits, LogitTransform
from verl.models.head.triton_softmax import TritonSoftmax

ROWS, HIDDEN, VOCABULARY = 40, 8, 1000
LAUNCHED = ["log_prob_statistics", "log_prob_gradient", "kl_statistics", "kl_gradient"]
KERNELS = [*LAUNCHED, "forward_kl_gradient"]  # the other direction of `kl_gradient`
UNREAD = {"kl_gradient": "ref_lse", "forward_kl_gradient": "mean_gap"}


@pytest.fixture
def choice(monkeypatch):
    """Let a test change what the choice depends on."""
    softmax_for.cache_clear()
    yield monkeypatch
    softmax_for.cache_clear()


@pytest.mark.nightly("verl/models/head")
def test_the_kernels_obey_their_laws_under_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/models/head_kernel_laws.py"],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 150
    assert "skipped" not in done.stdout


def test_cpus_take_torch_operations_and_gpus_the_kernels(choice):
    assert type(softmax_for("cpu")) is EagerSoftmax
    assert isinstance(softmax_for("cuda"), TritonSoftmax)


def test_a_gpu_without_triton_takes_torch_operations_and_says_so_once(choice, caplog):
    find_spec = importlib.util.find_spec
    choice.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))

    with caplog.at_level(logging.WARNING):
        chosen = [softmax_for("cuda") for _ in range(3)]

    assert all(type(softmax) is EagerSoftmax for softmax in chosen)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "softmax of the LM head" in message and "`triton`" in message


def compiled(kernel, capability, is_half, has_all):
    """Compile a kernel for a device that need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    function = getattr(triton_softmax, kernel.removeprefix("forward_"))
    constants: dict[str, Any] = {
        "scale": 1.0, "temperature": 0.7, "softcap": 30.0 if has_all else None, "block": triton_softmax.BLOCK,
        "ref_scale": 1.0, "ref_temperature": 1.0, "ref_softcap": 30.0 if has_all else None,
    }  # fmt: skip
    if not has_all:
        constants |= dict.fromkeys(("bias", "ref_bias", "entropy", "grad_entropy", "sum_squares"))
    if kernel in UNREAD or not has_all:
        constants[UNREAD.get(kernel, "ref_lse")] = None
    types = {"targets": "*i64", "vocabulary": "i32", "gradient_stride": "i32", "bias": "*bf16"}
    types["gradients"] = "*bf16" if is_half else "*fp32"
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"}
    source = ASTSource(
        function, signature, {name: constants[name] for name in names if name in constants}, aligned
    )
    options = {"num_warps": triton_softmax.NUM_WARPS}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.nightly("verl/models/head")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernels_compile_for_ampere_hopper_and_blackwell_without_spilled_registers(
    kernel, capability, tmp_path, monkeypatch
):
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for is_half, has_all in ((True, True), (True, False), (False, True)):
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(compiled(kernel, capability, is_half, has_all).asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "STACK:0 " in usage and "LOCAL:0 " in usage


@pytest.mark.parametrize("kernel", ["log_prob_gradient", "kl_gradient", "forward_kl_gradient"])
def test_no_thread_writes_half_precision_gradients_before_all_have_read_the_block(
    kernel, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = compiled(kernel, 90, is_half=True, has_all=True).asm["ptx"]

    steps = re.findall(r"ld\.global|bar\.sync|st\.global", ptx)

    *reads, barrier = steps[: steps.index("st.global")]
    assert barrier == "bar.sync"
    assert set(reads) == {"ld.global"}
    assert set(steps[len(reads) + 1 :]) == {"st.global"}


class Outputs(TorchDispatchMode):
    """Remembers the operators that ran and the largest tensors that each of them made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        sizes = [
            leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(result)
            if torch.is_tensor(leaf) and id(leaf.untyped_storage()) not in given
        ]
        self.made.append((str(function), max(sizes, default=0)))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_as_large_as_logits_is_made_around_the_kernels(choice, dtype):
    choice.setitem(BACKENDS, "cpu", replace(BACKENDS["cpu"], resource="GPU", has_kernels=True))
    launched = []
    choice.setattr(triton_softmax, "_launch", lambda kernel, *inputs: launched.append(kernel.fn.__name__))
    rows = 15  # of a chunk
    with FakeTensorMode():
        hidden = torch.zeros(ROWS, HIDDEN, dtype=dtype, requires_grad=True)
        weight = torch.zeros(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)
        policy = HeadLogits(hidden, weight, None, LogitTransform(softcap=30.0))
        reference = HeadLogits(hidden.detach(), weight.detach())
        targets = torch.zeros(ROWS, dtype=torch.int64)
        with Outputs() as outputs:
            result = linear_log_probs(
                policy, targets, with_entropy=True, with_sum_squares=True, chunk_bytes=4 * VOCABULARY * rows
            )
            kl = linear_kl(policy, reference, 2 * 4 * VOCABULARY * rows)
            forward = linear_kl(policy, reference, 2 * 4 * VOCABULARY * rows, is_forward=True)
            (result.log_probs + result.entropy + kl + forward).sum().backward()

    chunk = 4 * VOCABULARY * rows
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    assert result.sum_squared_probs.shape == kl.shape == (ROWS,)
    large = [name for name, size in outputs.made if size >= chunk]
    assert large == ["aten.new_empty.default"] * 10  # log-probs, and both models of two KLs, there and back
    for name in LAUNCHED:
        passes = 2 if name.startswith("kl_") else 1
        assert launched.count(name) == 3 * passes  # chunks


class ChunksAtCasts(TorchDispatchMode):
    """Counts the chunks of logits that are alive whenever a tensor of the weight's shape is cast."""

    def __init__(self):
        super().__init__()
        self.chunks, self.alive = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].shape == (VOCABULARY, HIDDEN):
            self.alive.append(sum(chunk() is not None for chunk in self.chunks))
        result = function(*args, **kwargs or {})
        if function is torch.ops.aten.new_empty.default and result.shape[-1] == VOCABULARY:
            self.chunks.append(weakref.ref(result.untyped_storage()))
        return result


def test_the_chunk_is_free_before_the_sum_of_the_weights_gradient_is_cast():
    hidden = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(ROWS, dtype=torch.int64)

    with ChunksAtCasts() as casts:
        result = linear_log_probs(HeadLogits(hidden, weight), targets, chunk_bytes=2 * VOCABULARY * 15)
        result.log_probs.sum().backward()

    assert len(casts.chunks) == 2  # there and back
    assert casts.alive == [0]


def test_torch_operations_give_the_same_for_every_size_of_a_block(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    head = HeadProducts(torch.randn(7, 50, generator=generator), None, LogitTransform(temperature=0.7))
    targets = torch.randint(50, (7,), generator=generator)
    results = []
    for elements in (1, 150, 1 << 19):
        monkeypatch.setattr(eager_softmax, "BLOCK_ELEMENTS", elements)
        results.append(LogProbStatistics(*torch.zeros(4, 7)))
        EagerSoftmax().log_probs(head, targets, results[-1])

    for columns in zip(*results, strict=True):
        for column in columns[1:]:
            torch.testing.assert_close(column, columns[0], atol=1e-6, rtol=0)
