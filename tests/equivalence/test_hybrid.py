# SPDX-License-Identifier: Apache-2.0
"""Linear attention layers over packed rows and shared prompts against the model's own padded forward."""

import itertools
from functools import lru_cache

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from tests.equivalence import test_packed_forward as packed_rows
from tests.equivalence import test_shared_prompts as shared_prompts
from tests.equivalence.test_packed_forward import (
    CLIP,
    IMAGE,
    WIDE,
    as_batch,
    load,
    reference,
    text_rows,
    vision_batch,
)
from tests.equivalence.test_shared_prompts import media_batch, text_batch
from verl.models import registry
from verl.models.linear_attention import layers
from verl.models.linear_attention.layers import linear_layers
from verl.models.registry import check_model, prepare_model
from verl.models.tiny import save_tiny_model
from verl.workers.packing.forward import PackedForward

FAMILIES = ["qwen3_next", "qwen3_5_text"]
VISION = ["qwen3_5", "qwen3_5_moe"]
LONG = ((70, 90), (3, 130), (9, 1), (64, 64))  # one to three chunks of the delta rule


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return lru_cache(lambda family: save_tiny_model(root / family, family))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_the_models_own_padded_forward(folders, family):
    packed_rows.assert_same(folders(family), as_batch(text_rows()))


def alone(model, batch):
    """Log-probs (B, R) of the model's own forward of each row on its own.

    Padding moves the chunks of its delta rule, which changes log-probs of -7 by up to 2e-5.
    """
    mask, responses = batch.batch["attention_mask"].bool(), batch.batch["loss_mask"]
    log_probs = torch.zeros(responses.shape)
    for row, (ids, keep) in enumerate(zip(batch.batch["input_ids"], mask, strict=True)):
        tokens, length = ids[keep], int(responses[row].sum())
        log_p = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
        taken = log_p.gather(-1, tokens[1:, None])[-length:, 0]
        log_probs[row] = nn.functional.pad(taken, (0, log_probs.shape[1] - length))
    return log_probs


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_longer_than_a_chunk_equal_the_models_own_forward(folders, family):
    batch = as_batch(text_rows(LONG), prompt=70, response=130)
    plain, packed = load(folders(family), False), load(folders(family), True)
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))
    forward = PackedForward(packed)

    expected = alone(plain, batch)
    (expected * weights).sum().backward()
    for rows in ([2, 0], [], [1, 3]):
        found = forward.log_probs(batch[rows], 1.0).log_probs
        torch.testing.assert_close(found, expected[rows], atol=1e-5, rtol=0)
        (found * weights[rows]).sum().backward()

    packed_rows.assert_same_gradients(packed, plain)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_equal_the_models_own_padded_forward(folders, family, checkpointed):
    lengths = shared_prompts.assert_same(folders(family), text_batch(), checkpointed=checkpointed)

    assert lengths[0] == 37 + 27 + 26  # prompts once


def test_prompts_shorter_than_the_convolution_and_empty_responses_equal_it_too(folders):
    sizes = ((1, (7, 20, 1)), (2, (0, 3)), (66, (4, 4, 4, 9)), (3, (0,)))

    shared_prompts.assert_same(folders("qwen3_5_text"), text_batch(sizes))


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("shared", [False, True], ids=["packed", "shared"])
def test_images_and_videos_equal_the_models_own_padded_forward(folders, family, shared):
    folder = folders(family)

    if shared:
        contents = [((IMAGE,), (5, 8, 3)), ((CLIP,), (9, 9)), ((), (4, 1))]
        shared_prompts.assert_same(folder, media_batch(folder, contents), checkpointed=True)
    else:
        contents = [((WIDE,), 5), ((), 4), ((IMAGE, CLIP), 3), ((CLIP,), 6)]
        packed_rows.assert_same(folder, vision_batch(folder, contents), parts=[[1], [3, 0], [], [2]])


def varlen_kernel(query, key, value, *, g, beta, initial_state, output_final_state, cu_seqlens, **options):
    """Stands for flash-linear-attention's kernel: rows between boundaries, each from its own state."""
    outs, states = [], []
    for row, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        tensors = (tensor[:, start:stop] for tensor in (query, key, value, g, beta))
        q, k, v, own_g, own_beta = tensors
        first = None if initial_state is None else initial_state[row : row + 1]
        out, last = torch_chunk_gated_delta_rule(
            q, k, v, own_g, own_beta, initial_state=first, output_final_state=output_final_state, **options
        )
        outs.append(out)
        states.append(last)
    return torch.cat(outs, 1), torch.cat(states) if output_final_state else None


@pytest.mark.parametrize("shared", [False, True], ids=["packed", "shared"])
def test_kernels_with_boundaries_compute_the_same(folders, monkeypatch, shared):
    monkeypatch.setattr(layers, "_varlen_kernel", lambda function, query: varlen_kernel)

    if shared:
        shared_prompts.assert_same(folders("qwen3_5_text"), text_batch())
    else:
        packed_rows.assert_same(folders("qwen3_5_text"), as_batch(text_rows()))


def test_a_state_that_leaks_over_a_row_start_is_found(folders, monkeypatch):
    """Without the change of its layers the model reads packed rows as one."""
    folder, batch = folders("qwen3_5_text"), as_batch(text_rows())
    monkeypatch.setattr(registry, "pack_linear_layers", lambda model: None)
    leaking = load(folder, True)

    with torch.no_grad():
        expected, _ = reference(load(folder, False), batch, 1.0)
        found = PackedForward(leaking).log_probs(batch, 1.0).log_probs

    first_row = batch.batch["loss_mask"].bool()[0]
    torch.testing.assert_close(found[0][first_row], expected[0][first_row], atol=1e-5, rtol=0)
    assert (found[1:] - expected[1:]).abs().max() > 0.01
    with pytest.raises(NotImplementedError, match=r"Qwen3_5ForCausalLM \(qwen3_5_text\) computes something"):
        check_model(leaking)


SMALL = dict(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
DELTA = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
EXPERTS = dict(
    num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts_per_tok=2
)
KIMI = dict(
    linear_num_heads=4, linear_head_dim=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    kv_lora_rank=16, q_lora_rank=16, n_routed_experts=4, num_experts_per_token=2,
    moe_intermediate_size=16, n_group=1,
    topk_group=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("qwen3_5_moe_text", DELTA | EXPERTS), ("olmo_hybrid", DELTA), ("kimi_linear", KIMI)],
)
def test_other_models_of_delta_rules_pass_the_self_check(model_type, options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL | options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    prepare_model(model)

    assert len(list(linear_layers(model))) == 1
    assert check_model(model) < 2e-6


def test_a_prepared_model_keeps_its_own_forward_and_the_names_of_its_parts(folders):
    model, plain = load(folders("qwen3_5_text"), True), load(folders("qwen3_5_text"), False)

    assert list(model.state_dict()) == list(plain.state_dict())
    names = [[type(module).__name__ for module in each.modules()] for each in (model, plain)]
    assert [name.replace("DeferringHead", "Linear") for name in names[0]] == names[1]
    layer, own = next(linear_layers(model)), next(linear_layers(plain))
    hidden = torch.randn(2, 9, 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(hidden), own(hidden))
