# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from transformers import Qwen2Config, Qwen3VLMoeConfig

from verl.distributed.weights.gathering import full_named_tensors
from verl.workers.rollout.vllm.weight_sync import engine_weights, load_into


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


def test_weights_that_the_engine_holds_in_float32_are_not_rounded():
    class Engine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Linear(1, 1, dtype=torch.bfloat16)
            self.gate.e_score_correction_bias = torch.nn.Parameter(torch.zeros(1))

        def load_weights(self, weights):
            self.read = dict(weights)
            return {"gate.weight", "gate.bias", "gate.e_score_correction_bias"}

    engine, value = Engine(), torch.tensor([8.0625 + 2**-10])
    names = ["weight", "bias", "e_score_correction_bias"]

    load_into(engine, [(f"model.gate.{name}", value) for name in names], Qwen2Config(), torch.bfloat16)

    assert [tensor.dtype for tensor in engine.read.values()] == [torch.bfloat16] * 2 + [torch.float32]
    assert torch.equal(engine.read["model.gate.e_score_correction_bias"], value)


@pytest.mark.parametrize("reported", ["experts.w2_weight", "experts.routed_experts.w2_weight"])
def test_experts_are_reached_by_either_name_that_vllm_reports(reported):
    class Engine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.Module()
            self.experts.routed_experts = torch.nn.Module()
            self.experts.routed_experts.w2_weight = torch.nn.Parameter(torch.zeros(1))

        def load_weights(self, weights):
            return {reported for _ in weights}

    loaded = load_into(Engine(), [("experts.w2", torch.ones(1))], Qwen2Config(), torch.float32)

    assert loaded == {"experts.routed_experts.w2_weight"}


def test_buffers_keep_their_precision_when_weights_are_gathered():
    module = torch.nn.Linear(1, 1)
    module.register_buffer("bias_of_choice", torch.tensor([8.0625 + 2**-10]))

    gathered = dict(full_named_tensors(module, torch.bfloat16))

    assert gathered["weight"].dtype == torch.bfloat16
    assert torch.equal(gathered["bias_of_choice"], module.get_buffer("bias_of_choice"))


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
