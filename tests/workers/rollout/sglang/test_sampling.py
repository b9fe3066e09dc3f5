# SPDX-License-Identifier: Apache-2.0
"""Changes to SGLang's scheduler, tested without it: draws by seed, truncation, buckets of weights."""

import pytest
import torch
from transformers import Qwen2Config

from verl.workers.rollout.interface import SamplingOptions
from verl.workers.rollout.sglang.loaded_weights import flatten, has_own_head, unflatten
from verl.workers.rollout.sglang.scheduler import draw, truncated, uniform
from verl.workers.rollout.sglang.sglang_requests import sampling_params


def splitmix64(state):
    """The generator of Steele, Lea and Flood (2014), figure 17, in whole numbers."""
    mask = (1 << 64) - 1
    bits = (state + 0x9E3779B97F4A7C15) & mask
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    return bits ^ (bits >> 31)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (7, 1000), ((1 << 62) - 1, 131_071)])
def test_the_number_of_a_token_is_that_of_splitmix64(seed, position):
    expected = (splitmix64((seed + position * 0x9E3779B97F4A7C15) % (1 << 64)) >> 11) * 2.0**-53

    assert uniform(torch.tensor([seed]), torch.tensor([position])).item() == expected


def test_tokens_are_drawn_as_often_as_their_probabilities_say():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    number = 40_000
    positions = torch.arange(number) % 200
    seeds = torch.arange(number) // 200

    tokens = draw(probs.expand(number, -1), uniform(seeds, positions))

    counts = torch.bincount(tokens, minlength=5) / number
    assert counts[1] == 0
    assert (counts - probs).abs().max() < 4 * (0.25 / number) ** 0.5


def test_a_draw_reaches_the_first_and_the_last_token_that_have_a_weight():
    weights = torch.tensor([[0.0, 1.0, 1.0, 0.0]]).expand(4, -1)

    assert draw(weights, torch.tensor([0.0, 0.5, 1 - 2.0**-53, 1.0], dtype=torch.float64)).tolist() == [
        1,
        2,
        2,
        2,
    ]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (5, 1.0, 0.0, [0.1, 0.4, 0.2, 0.25, 0.05]),
        (2, 1.0, 0.0, [0.0, 0.4, 0.0, 0.25, 0.0]),
        (5, 0.6, 0.0, [0.0, 0.4, 0.0, 0.25, 0.0]),  # 0.4 alone is less than 0.6
        (5, 1.0, 0.5, [0.0, 0.4, 0.2, 0.25, 0.0]),
        (1, 0.01, 1.0, [0.0, 0.4, 0.0, 0.0, 0.0]),
    ],
)
def test_top_k_top_p_and_min_p_keep_the_likeliest_tokens(top_k, top_p, min_p, kept):
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.25, 0.05]])

    found = truncated(probs, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))

    assert found.tolist() == [pytest.approx(kept)]


def test_a_bucket_gives_back_its_tensors_whatever_their_types():
    tensors = [
        ("a", torch.randn(3, dtype=torch.bfloat16)),
        ("b", torch.randn(2, 5).t()),
        ("c", torch.tensor(7)),
        ("d", torch.zeros(0, 4)),
    ]

    bucket = flatten(tensors)

    found = dict(unflatten(bucket))
    assert list(found) == ["a", "b", "c", "d"]
    for name, tensor in tensors:
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_a_head_is_tied_in_the_config_and_not_in_the_module():
    class Model(torch.nn.Module):
        def __init__(self, is_tied):
            super().__init__()
            self.model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(4, 2)})
            self.lm_head = self.model["embed_tokens"] if is_tied else torch.nn.Linear(2, 4, bias=False)

    tied, untied = Qwen2Config(tie_word_embeddings=True), Qwen2Config(tie_word_embeddings=False)

    assert has_own_head(Model(is_tied=False), tied)
    assert not has_own_head(Model(is_tied=True), tied)
    assert not has_own_head(Model(is_tied=False), untied)


def test_options_get_sglangs_names():
    options = SamplingOptions(
        temperature=0.7,
        top_p=0.9,
        top_k=0,
        extra={"presence_penalty": 0.5, "logit_bias": {3: 1.5}, "stop_token_ids": [9]},
    )

    params = sampling_params(options, banned=[4], ends=[2], max_tokens=8, seed=5)

    assert params == dict(
        temperature=0.7, top_p=0.9, top_k=-1, max_new_tokens=8, presence_penalty=0.5, ignore_eos=False,
        sampling_seed=5, stop_token_ids=[9, 2], logit_bias={"3": 1.5, "4": float("-inf")},
    )  # fmt: skip
    greedy = sampling_params(SamplingOptions(temperature=0.0, ignore_eos=True), [], [2], 8, 5)
    assert (greedy["temperature"], greedy["stop_token_ids"], greedy["logit_bias"]) == (0.0, None, None)
    with pytest.raises(ValueError, match=r"cannot sample with \['stop'\]"):
        sampling_params(SamplingOptions(extra={"stop": ["x"]}), [], [], 8, 5)
