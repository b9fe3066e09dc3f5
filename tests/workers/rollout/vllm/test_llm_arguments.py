# SPDX-License-Identifier: Apache-2.0
from transformers import Qwen2Config

from tests.workers.rollout.reference import rollout_config
from verl.workers.rollout.vllm.llm_arguments import _cpu_arguments


def test_the_cpu_cache_holds_the_sequences_up_to_one_gib_and_four_of_any_length():
    # 2 layers, 2 heads of 32: 2 * 2 * 2 * 32 values of 4 bytes are 1 KiB for a token; a block has 32 tokens
    config = Qwen2Config(
        num_hidden_layers=2, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32
    )
    one_block = 32 * 1024

    short, long, longest = (
        _cpu_arguments(rollout_config(), config, length)["kv_cache_memory_bytes"]
        for length in (100, 8192, 10**6)
    )

    assert short == 256 * 5 * one_block
    assert long == 1 << 30
    assert longest == 4 * 31251 * one_block
