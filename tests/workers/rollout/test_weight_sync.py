# SPDX-License-Identifier: Apache-2.0
import torch
from transformers import Qwen2Config, Qwen3VLMoeConfig

from verl.workers.rollout.weight_sync import engine_weights


def test_a_tied_head_is_consumed_and_left_out():
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


def test_weights_are_cast_to_the_engines_dtype_and_integers_are_not():
    tensors = [("a", torch.ones(1)), ("b", torch.ones(1, dtype=torch.int64))]

    dtypes = [tensor.dtype for _, tensor in engine_weights(tensors, Qwen2Config(), torch.bfloat16)]

    assert dtypes == [torch.bfloat16, torch.int64]


def test_only_square_experts_of_transposed_model_types_are_transposed():
    # `HubNames` has transposed the others; it leaves square ones as transformers holds them
    square, flat = torch.randn(2, 8, 8), torch.randn(2, 6, 8)
    named = [
        ("model.language_model.layers.0.mlp.experts.gate_up_proj", square),
        ("layers.0.mlp.experts.down_proj", flat),
        ("layers.0.mlp.gate.weight", square),
    ]
    config = Qwen3VLMoeConfig(text_config={"hidden_size": 8})

    transposed = [tensor for _, tensor in engine_weights(named, config, torch.float32)]
    other_type = [tensor for _, tensor in engine_weights(named, Qwen2Config(hidden_size=8), torch.float32)]

    assert torch.equal(transposed[0], square.transpose(1, 2))
    assert torch.equal(transposed[1], flat) and torch.equal(transposed[2], square)
    assert all(torch.equal(found, given) for found, (_, given) in zip(other_type, named, strict=True))
