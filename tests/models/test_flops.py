# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoProcessor

from tests.helpers.causal_families import FAMILIES, build_family
from verl.distributed.known_gpus import find_gpu
from verl.models.families.interface import Medium
from verl.models.families.registry import media_family_of
from verl.models.flops import FlopsCounter, PackedWork, causal_pairs, window_pairs
from verl.models.hub_names import auto_class, meta_model
from verl.models.lora import attach_adapters
from verl.models.lora_weights import AdapterConfig
from verl.models.tiny import save_tiny_model

LENGTH = 24


def alone(*lengths):
    return [(length, ()) for length in lengths]


def forward(counter, groups, to_head=None, media=()):
    return counter.count(PackedWork(groups, to_head), media)[0]


def training(counter, groups, to_head=None, media=()):
    return sum(counter.count(PackedWork(groups, to_head), media))


def count_of(config):
    return FlopsCounter(meta_model(config))


def load_tiny(tmp_path, family, **overrides):
    path = save_tiny_model(tmp_path / family, family, **overrides)
    config = AutoConfig.from_pretrained(path)
    slow = {"attn_implementation": "eager", "experts_implementation": "eager"}  # torch counts these
    return config, auto_class(config).from_pretrained(path, **slow)


def measured(model, backward=False, **inputs):
    """What torch counts; its attention forms the products of all pairs, also those that the mask removes."""
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        logits = model(**inputs, use_cache=False).logits
        if backward:
            logits.sum().backward()
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
    counter, groups = count_of(config), alone(3, 2)

    assert forward(counter, groups) == 2 * 5 * (weights + head) + attention
    assert forward(counter, groups, to_head=2) == 2 * (5 * weights + 2 * head) + attention
    assert training(counter, groups) == 3 * forward(counter, groups)


def test_a_shared_prompt_runs_once_and_each_response_attends_to_it(tmp_path):
    counter = count_of(load_tiny(tmp_path, "qwen2")[0])
    # A prompt of 4 tokens, responses of 2 and 1: 10 + (5 + 6) + 5 pairs in each of 2 layers, 128 channels.
    attention = 4 * 128 * 2 * (10 + 11 + 5)

    assert forward(counter, [(4, (2, 1))], to_head=0) == 2 * 7 * (2 * 147_456) + attention
    assert forward(counter, alone(6, 5), to_head=0) > forward(counter, [(4, (2, 1))], to_head=0)


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
    assert forward(count_of(config), alone(3, 2)) == expected


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
    counter = count_of(build_family(model_type, FAMILIES[model_type] | sizes).config)
    attending = 2 if model_type == "falcon_h1" else 1  # of 2 layers

    assert counter.text.states == states
    # Twice as long: only pairs of attention are more than twice as many. 4 heads of 16.
    more = forward(counter, alone(20)) - 2 * forward(counter, alone(10))
    assert more == 4 * attending * 4 * 16 * (causal_pairs(20) - 2 * causal_pairs(10))


def test_a_convolution_counts_whole_in_a_mixture_of_experts():
    config = build_family("qwen3_next", FAMILIES["qwen3_next"]).config
    wide = copy.deepcopy(config)
    wide.linear_conv_kernel_dim += 3
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    channels += config.linear_num_value_heads * config.linear_value_head_dim

    more = forward(count_of(wide), alone(1)) - forward(count_of(config), alone(1))
    assert more == 2 * 3 * channels


@pytest.mark.parametrize("family", ["qwen2", "deepseek", "llama", "qwen3", "qwen3_moe", "gemma3"])
def test_text_models_match_torchs_count_without_masked_pairs(tmp_path, family):
    window = {"sliding_window": LENGTH} if family == "gemma3" else {}
    config, model = load_tiny(tmp_path, family, **window)

    flops = measured(model, input_ids=torch.arange(LENGTH)[None])

    counted = forward(count_of(config), alone(LENGTH))
    assert counted + masked_pairs(config, LENGTH) == pytest.approx(flops, rel=0.01)


ALL, ADAPTERS, LAST, LANGUAGE = "all", "adapters", "last layer", "language model"


def select(model, trained):
    """Mark what is trained."""
    if trained == ADAPTERS:
        attach_adapters(model, AdapterConfig(4, 8, "all-linear"), "worker.actor.model.lora")
        return
    for name, weight in model.named_parameters():
        is_last = ".layers.1." in name or name.startswith("lm_head")
        weight.requires_grad_(is_last if trained == LAST else trained == ALL or "language_model" in name)


@pytest.mark.parametrize("trained", [ALL, ADAPTERS, LAST])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_gradients_match_torchs_count(tmp_path, family, trained):
    config, model = load_tiny(tmp_path, family, tie_word_embeddings=False)
    select(model, trained)

    flops = measured(model, backward=True, input_ids=torch.arange(LENGTH)[None])

    # the scores of both layers have gradients, or of the last one alone
    passes = 1 + (1 if trained == LAST else 2)
    counted = training(FlopsCounter(model), alone(LENGTH)) + passes * masked_pairs(config, LENGTH)
    # of q, k and v, which follow each other in the count, torch leaves out the gradients of a frozen input
    assert counted == pytest.approx(flops, rel=0.01 if trained == ALL else 0.04)


@pytest.mark.parametrize("trained", [ALL, LANGUAGE])
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3_vl", "mistral3"])
def test_encoders_match_torchs_count(tmp_path, kind, trained):
    config, model = load_tiny(tmp_path, kind)
    select(model, trained)
    family = media_family_of(config)
    row = family.example(config, AutoProcessor.from_pretrained(config._name_or_path), torch.Generator())
    ids, length = row.input_ids[None], len(row.input_ids)
    inputs = family.own_arguments(config, ids) | family.own_inputs(row.media)
    if kind.startswith("qwen"):
        inputs["mm_token_type_ids"] = (ids == config.image_token_id).int()

    flops = measured(model, backward=True, input_ids=ids, **inputs)

    counted = training(FlopsCounter(model), alone(length), media=row.media)
    assert counted + 3 * masked_pairs(config, length) == pytest.approx(flops, rel=0.01)


def test_windows_of_a_tower_are_cut_off_at_the_edges():
    # 8 x 6 patches in windows of 4 x 4: four of 16, of which two are cut off to 4 x 2
    assert window_pairs(8, 6, 4) == 2 * 16**2 + 2 * 8**2


def test_frames_of_a_video_do_not_attend_to_each_other(tmp_path):
    counter = count_of(load_tiny(tmp_path, "qwen3_vl")[0])

    video, image = (
        forward(counter, [], media=[Medium(kind, {}, {"grid_thw": grid})])
        for kind, grid in (("video", (3, 8, 8)), ("image", (1, 8, 8)))
    )

    assert video == 3 * image


def test_a_pass_without_autograd_counts_its_forward_part_only(tmp_path):
    counter, groups = count_of(load_tiny(tmp_path, "qwen2")[0]), alone(9)
    with torch.no_grad():
        counter.add(PackedWork(groups, 4))
    assert counter.done == forward(counter, groups, to_head=4)

    counter.add(PackedWork(groups, 4, ranks=2))
    assert counter.done == forward(counter, groups, to_head=4) + training(counter, groups, to_head=4) / 2


def test_experts_without_routed_tokens_cost_nothing(tmp_path):
    few, _ = load_tiny(tmp_path, "qwen3_moe")
    many, _ = load_tiny(tmp_path, "qwen3_moe", num_experts=64)

    # Only the router grows: 60 more experts x hidden 128 in 2 layers.
    assert forward(count_of(many), alone(1)) - forward(count_of(few), alone(1)) == 2 * 2 * 60 * 128


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
    assert find_gpu(name).peak == pytest.approx(teraflops * 1e12)


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
    assert find_gpu(name) is None


def test_ranks_that_share_layers_share_their_operations(tmp_path):
    config, _ = load_tiny(tmp_path, "qwen3")
    whole, part = (FlopsCounter(meta_model(config), ranks) for ranks in (1, 2))

    assert training(part, alone(LENGTH, 7), 5) == training(whole, alone(LENGTH, 7), 5) / 2
