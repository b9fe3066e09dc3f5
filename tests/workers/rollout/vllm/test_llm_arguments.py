# SPDX-License-Identifier: Apache-2.0
from transformers import Qwen2_5_VLConfig, Qwen2Config

from tests.helpers.fp8_files import set_quantization
from tests.workers.rollout.reference import rollout_config, setup_of
from verl.config.rollout import SpeculativeConfig
from verl.workers.rollout.vllm.llm_arguments import _cpu_arguments, engine_arguments, speculative_arguments


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


def test_each_method_gets_its_own_arguments_of_vllm():
    assert speculative_arguments(SpeculativeConfig("ngram", 5, 1, 3)) == {
        "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
    }  # fmt: skip
    assert speculative_arguments(SpeculativeConfig("suffix", 8, suffix_max_cached_requests=0)) == {
        "method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 0,
    }  # fmt: skip


def test_further_arguments_replace_those_of_the_run_and_join_its_mappings(tmp_path):
    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    config = rollout_config(
        engine_arguments={"block_size": 64, "limit_mm_per_prompt": {"video": 1}}, limit_images=2
    )

    arguments = engine_arguments(config, setup_of(tmp_path), Qwen2_5_VLConfig())

    assert arguments["block_size"] == 64
    assert arguments["limit_mm_per_prompt"] == {"image": 2, "video": 1}


def test_an_engine_is_built_with_whole_weights_where_those_of_the_files_are_in_fp8(tmp_path):
    plain = Qwen2Config()
    plain.save_pretrained(tmp_path)
    set_quantization(tmp_path, quant_method="fp8", weight_block_size=[128, 128])

    change = engine_arguments(rollout_config(), setup_of(tmp_path), plain)["hf_overrides"]

    changed = change(Qwen2Config.from_pretrained(tmp_path))
    assert not hasattr(changed, "quantization_config")
