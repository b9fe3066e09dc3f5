# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from tests.helpers.causal_families import FAMILIES, build_family
from verl.models.flops import FlopsCounter, causal_pairs, peak_flops
from verl.models.hub_names import auto_class
from verl.models.tiny import save_tiny_model

LENGTH = 24


def load_tiny(tmp_path, family, **overrides):
    path = save_tiny_model(tmp_path / family, family, **overrides)
    config = AutoConfig.from_pretrained(path)
    slow = {"attn_implementation": "eager", "experts_implementation": "eager"}  # torch counts these
    return config, auto_class(config).from_pretrained(path, **slow)


def measured(model, **inputs):
    """What torch counts; its attention forms the products of all pairs, also those that the mask removes."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, use_cache=False)
    return counter.get_total_flops()


def masked_pairs(config, length):
    text = config.get_text_config()
    channels = text.num_attention_heads * text.head_dim * text.num_hidden_layers
    return 4 * channels * (length * length - causal_pairs(length))


def test_qwen2_by_hand(tmp_path):
    config, _ = load_tiny(tmp_path, "qwen2")

    # Hidden 128, 4 heads and 2 kv heads of 32, MLP 256, 2 layers, vocabulary 512.
    # A layer's matrices: q and o 128 x 128, k and v 64 x 128, three of 256 x 128 = 49,152 + 98,304 = 147,456.
    weights = 2 * 147_456
    head = 512 * 128
    # Sequences of 3 and 2 tokens: 6 + 3 pairs in each of 2 layers, 128 channels.
    attention = 4 * 128 * 2 * (6 + 3)
    counter = FlopsCounter(config)

    assert counter.forward([3, 2]) == 2 * 5 * (weights + head) + attention
    assert counter.forward([3, 2], num_response_tokens=2) == 2 * (5 * weights + 2 * head) + attention
    assert counter.training([3, 2]) == 3 * counter.forward([3, 2])


def test_a_layer_of_gated_delta_rule_by_hand(tmp_path):
    config, _ = load_tiny(tmp_path, "qwen3_5_text", num_hidden_layers=2)
    text = config.get_text_config()
    assert text.layer_types == ["linear_attention", "full_attention"]
    sizes = (text.linear_num_key_heads, text.linear_key_head_dim, text.linear_num_value_heads)
    assert (*sizes, text.linear_value_head_dim, text.linear_conv_kernel_dim) == (2, 64, 4, 64, 4)

    # Hidden 128, MLP 256 (3 x 256 x 128 = 98,304), vocabulary 512. The linear layer: 2 key heads of 64, 4
    # value heads of 64. Queries, keys and values are 128 + 128 + 256 = 512 channels, the gate 256, decay and
    # beta 4 each: (512 + 256 + 8) x 128 = 99,328; out 128 x 256 = 32,768; the convolution 512 x 4 = 2,048.
    linear = 99_328 + 32_768 + 2_048 + 98_304
    # The full layer: 4 heads of 32 with a gate (256 x 128), 2 kv heads (2 x 64 x 128), out 128 x 128.
    full = 32_768 + 16_384 + 16_384 + 98_304
    # A token and value head: a state of 64 x 64, times 2 for S k, 2 for the outer product, 2 for S q.
    state = 4 * 6 * 64 * 64
    # Sequences of 3 and 2 tokens: 6 + 3 pairs in the one full layer, 128 channels.
    attention = 4 * 128 * (6 + 3)

    expected = 5 * (2 * (linear + full + 512 * 128) + state) + attention
    assert FlopsCounter(config).forward([3, 2]) == expected


# State operations of a token, by hand from the sizes of `causal_families`.
STATES = {
    "qwen3_next": (
        6 * 4 * 16 * 8,
        {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_value_heads": 4},
    ),
    "minimax": (4 * 4 * 16 * 16, {}),  # 4 heads of 16
    "bamba": (4 * 2 * 64 * 8, {}),  # 2 x hidden 64 channels, each with a state of 8
    "jamba": (4 * 2 * 64 * 8, {}),
    "falcon_h1": (2 * 4 * 64 * 8, {}),  # in both layers 64 channels, besides attention
    "lfm2": (0, {}),  # a convolution only
}


@pytest.mark.parametrize("model_type", STATES)
def test_layers_with_a_state_cost_each_token_the_same(model_type):
    states, sizes = STATES[model_type]
    counter = FlopsCounter(build_family(model_type, FAMILIES[model_type] | sizes).config)
    attending = 2 if model_type == "falcon_h1" else 1  # of 2 layers

    assert counter.text.states == states
    # Twice as long: only pairs of attention are more than twice as many. 4 heads of 16.
    more = counter.forward([20]) - 2 * counter.forward([10])
    assert more == 4 * attending * 4 * 16 * (causal_pairs(20) - 2 * causal_pairs(10))


def test_a_convolution_counts_whole_in_a_mixture_of_experts():
    config = build_family("qwen3_next", FAMILIES["qwen3_next"]).config
    wide = copy.deepcopy(config)
    wide.linear_conv_kernel_dim += 3
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    channels += config.linear_num_value_heads * config.linear_value_head_dim

    more = FlopsCounter(wide).forward([1]) - FlopsCounter(config).forward([1])
    assert more == 2 * 3 * channels


@pytest.mark.parametrize("family", ["qwen2", "deepseek", "llama", "qwen3", "qwen3_moe", "gemma3"])
def test_text_models_match_torchs_count_without_masked_pairs(tmp_path, family):
    window = {"sliding_window": LENGTH} if family == "gemma3" else {}
    config, model = load_tiny(tmp_path, family, **window)

    flops = measured(model, input_ids=torch.arange(LENGTH)[None])

    assert FlopsCounter(config).forward([LENGTH]) + masked_pairs(config, LENGTH) == pytest.approx(
        flops, rel=0.01
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_vision_towers_match_torchs_count(tmp_path, family):
    config, model = load_tiny(tmp_path, family)
    grid = (1, 8, 6)  # windows of 4 x 4 patches in Qwen2.5-VL, two of them cut off
    tower = config.vision_config
    pixels = torch.rand(48, tower.in_channels * tower.temporal_patch_size * tower.patch_size**2)
    tokens = torch.tensor([[1, 2, *[config.image_token_id] * 12, 3]])

    types = (tokens == config.image_token_id).int()
    flops = measured(
        model,
        input_ids=tokens,
        pixel_values=pixels,
        image_grid_thw=torch.tensor([grid]),
        mm_token_type_ids=types,
    )

    expected = FlopsCounter(config).forward([15], grids=[grid]) + masked_pairs(config, 15)
    assert expected == pytest.approx(flops, rel=0.02)


def test_frames_of_a_video_do_not_attend_to_each_other(tmp_path):
    counter = FlopsCounter(load_tiny(tmp_path, "qwen3_vl")[0])

    video, image = (counter.forward([], grids=[grid]) for grid in ((3, 8, 8), (1, 8, 8)))

    assert video == 3 * image


def test_a_frozen_vision_tower_has_no_backward_pass(tmp_path):
    config, _ = load_tiny(tmp_path, "qwen2_vl")
    grids = [(1, 4, 4)]

    trained, frozen = FlopsCounter(config), FlopsCounter(config, trains_vision=False)

    vision = trained.forward([], grids=grids)
    assert trained.training([9], grids=grids) - frozen.training([9], grids=grids) == 2 * vision


def test_experts_without_routed_tokens_cost_nothing(tmp_path):
    few, _ = load_tiny(tmp_path, "qwen3_moe")
    many, _ = load_tiny(tmp_path, "qwen3_moe", num_experts=64)

    # Only the router grows: 60 more experts x hidden 128 in 2 layers.
    assert FlopsCounter(many).forward([1]) - FlopsCounter(few).forward([1]) == 2 * 2 * 60 * 128


@pytest.mark.parametrize(
    ("length", "window", "pairs"),
    [(4, None, 10), (4, 4, 10), (4, 9, 10), (4, 1, 4), (5, 2, 1 + 2 + 2 + 2 + 2), (0, None, 0), (0, 3, 0)],
)
def test_a_token_attends_to_itself_and_its_window(length, window, pairs):
    assert causal_pairs(length, window) == pairs


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
    ],
)
def test_each_device_has_its_own_peak(name, teraflops):
    assert peak_flops(name) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA X1000",
        "",
    ],
)
def test_an_unknown_device_has_no_peak(name):
    assert peak_flops(name) is None


def test_mfu_is_the_share_of_the_peak_and_none_without_one(tmp_path):
    counter = FlopsCounter(load_tiny(tmp_path, "qwen2")[0], device="cpu")
    assert counter.mfu([10], seconds=1.0) is None

    counter.peak = 1e12
    assert counter.mfu([10, 10], seconds=2.0) == pytest.approx(counter.training([10, 10]) / 2e12)
