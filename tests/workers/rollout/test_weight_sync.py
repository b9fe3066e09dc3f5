# SPDX-License-Identifier: Apache-2.0
import torch
from transformers import Qwen2Config, Qwen3VLMoeConfig

from verl.workers.rollout.weight_sync import engine_weights, hub_experts


def test_a_tied_head_is_left_out_and_produced_all_the_same():
    produced = []

    def tensors():
        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
            produced.append(name)
            yield name, torch.ones(2)

    tied = [
        name for name, _ in engine_weights(tensors(), Qwen2Config(tie_word_embeddings=True), torch.float32)
    ]
    untied = [
        name for name, _ in engine_weights(tensors(), Qwen2Config(tie_word_embeddings=False), torch.float32)
    ]

    assert tied == ["model.embed_tokens.weight", "model.norm.weight"]
    assert untied == produced[:3]
    assert len(produced) == 6


def test_weights_take_the_engines_dtype_and_integers_keep_theirs():
    tensors = [("a", torch.ones(1)), ("b", torch.ones(1, dtype=torch.int64))]

    dtypes = [tensor.dtype for _, tensor in engine_weights(tensors, Qwen2Config(), torch.bfloat16)]

    assert dtypes == [torch.bfloat16, torch.int64]


def test_joint_experts_come_out_as_on_the_hub_from_either_layout():
    # 2 experts, hidden size 8, intermediate size 3
    gate_up, down = torch.randn(2, 6, 8), torch.randn(2, 8, 3)
    names = "model.language_model.layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"

    for name, in_memory in zip(names, (gate_up, down), strict=True):
        on_hub = in_memory.transpose(1, 2)
        assert torch.equal(hub_experts(name, in_memory, 8), on_hub)
        assert torch.equal(hub_experts(name, on_hub, 8), on_hub)
    assert torch.equal(hub_experts("layers.0.mlp.gate.weight", gate_up, 8), gate_up)
    square = torch.randn(2, 8, 8)
    assert torch.equal(hub_experts(names[0], square, 8), square.transpose(1, 2))


def test_only_model_types_that_are_transposed_on_the_hub_are_transposed():
    tensor = torch.randn(2, 6, 8)
    config = Qwen3VLMoeConfig(text_config={"hidden_size": 8})
    named = [("mlp.experts.gate_up_proj", tensor)]

    [(_, transposed)] = engine_weights(named, config, torch.float32)
    [(_, same)] = engine_weights(named, Qwen2Config(hidden_size=8), torch.float32)

    assert torch.equal(transposed, tensor.transpose(1, 2))
    assert torch.equal(same, tensor)
