# SPDX-License-Identifier: Apache-2.0
"""Scores on gloo ranks against transformers' own sequence-classification models, one row at a time."""

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
)

from tests.helpers.distributed import run_distributed
from tests.helpers.grids import inputs_of, positions_of
from tests.helpers.media import image_bytes
from verl.config.model import FSDPConfig, ModelConfig
from verl.config.worker import RewardModelConfig
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.readers import read_tokenizer
from verl.distributed.fsdp import make_mesh
from verl.models.hub_names import auto_class
from verl.models.scalar_head import make_scalar
from verl.models.tiny import save_tiny_model, train_tokenizer
from verl.protocol import DataProto, objects
from verl.workers.model_builder import build_model
from verl.workers.packing.forward import PackedForward
from verl.workers.roles.reward_model import RewardModelScorer

PROMPT_LENGTH, RESPONSE_LENGTH = 24, 6
PROMPTS = ["How many?", "What colour is the circle?", "1 + 2", "red"]
RESPONSES = [
    "three",
    "First, we add the numbers",
    "{ 3 }",
    "the answer is one two",
    "blue",
    "( 4 )",
    "no",
    "two six",
]
TEMPLATE = "{% for message in messages %}# {{ message.role }} = {{ message.content }}\n{% endfor %}"
SIZES = [1, 3]


def save_reward_model(folder, *, vocab_size=512, template=None, family="qwen2", num_labels=1):
    """A reward model with its own tokenizer; its weights are random."""
    save_tiny_model(folder, family, num_hidden_layers=1)
    tokenizer = train_tokenizer(vocab_size)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, num_labels=num_labels)
    torch.manual_seed(7)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def make_batch():
    """Two responses to each prompt in the policy's tokens: finished ones, and some that were cut off."""
    tokenizer = train_tokenizer()
    rows, texts = [], []
    for row, response in enumerate(RESPONSES):
        messages = [{"role": "user", "content": PROMPTS[row // 2]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer.encode(prompt)
        ids = [*tokenizer.encode(response), tokenizer.eos_token_id][:RESPONSE_LENGTH]
        left, right = PROMPT_LENGTH - len(prompt_ids), RESPONSE_LENGTH - len(ids)
        mask = [0] * left + [1] * (len(prompt_ids) + len(ids)) + [0] * right
        rows.append(
            ([tokenizer.pad_token_id] * left + prompt_ids + ids + [tokenizer.pad_token_id] * right, mask)
        )
        texts.append(messages)
    tokens, mask = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    return DataProto.from_dict(
        {
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": tokens[:, PROMPT_LENGTH:],
            "response_mask": mask[:, PROMPT_LENGTH:],
        },
        {"prompt_messages": objects(texts), "multi_modal_data": objects([None] * len(rows))},
    )


def make_config(folder, size=4, model_path=None):
    return RewardModelConfig(
        micro_batch_size_per_device=size,
        model=ModelConfig(model_path=str(model_path or folder)),
        fsdp=FSDPConfig(mp_param_dtype="fp32", torch_dtype="fp32"),
    )


def make_scorer(folder, size=4, policy_model_type="qwen2", media=None):
    config = make_config(folder, size)
    model = build_model(
        config.model, config.fsdp, mesh=make_mesh(dist.get_world_size(), -1, "cpu"), device="cpu",
        trainable=False, head="scalar", option="worker.reward_model.model",
    )  # fmt: skip
    return RewardModelScorer(
        PackedForward(model, media, "cpu"),
        read_tokenizer(str(folder)),
        train_tokenizer(),
        config,
        policy_model_type=policy_model_type,
    )


@torch.no_grad()
def plain_scores(folder, rows):
    """What transformers makes of each row of token ids alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    return torch.stack([model(input_ids=torch.tensor([row])).logits[0, 0] for row in rows])


def rows_as_they_are():
    tensors = make_batch().batch
    return [
        row[kept.bool()].tolist()
        for row, kept in zip(tensors["input_ids"], tensors["attention_mask"], strict=True)
    ]


def rows_written_anew(folder):
    """The texts as the template puts them together; cut responses as far as they go."""
    policy, tokenizer = train_tokenizer(), read_tokenizer(str(folder))
    rows = []
    for row, response in enumerate(RESPONSES):
        kept = policy.decode(policy.encode(response)[:RESPONSE_LENGTH])
        rows.append(tokenizer.encode(f"# user = {PROMPTS[row // 2]}\n# assistant = {kept}\n"))
    return rows


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("reward_model")
    same = save_reward_model(root / "same")
    other = save_reward_model(root / "other", vocab_size=300, template=TEMPLATE, family="llama")
    torch.save(
        {
            "same": plain_scores(same, rows_as_they_are()),
            "other": plain_scores(other, rows_written_anew(other)),
        },
        root / "expected.pt",
    )
    return root


def score_on_ranks(rank, world_size, root):
    batch = make_batch()
    rows = list(range(rank, len(batch), world_size))
    results = {}
    for name in ("same", "other"):
        scorer = make_scorer(root / name)
        for size in SIZES:
            scorer.config = make_config(root / name, size)
            results[name, size] = (rows, scorer.score(batch[rows]).numpy())
    return results


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def results(request, root, one_rank):
    return (
        [score_on_ranks(0, 1, root)]
        if request.param == 1
        else run_distributed(score_on_ranks, request.param, root)
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["same", "other"])
def test_scores_equal_transformers_on_single_rows(results, root, name, size):
    expected = torch.load(root / "expected.pt")[name]
    assert expected.std() > 0.01  # scores differ between rows

    for rank in results:
        rows, scores = rank[name, size]
        assert scores.dtype.name == "float32"
        torch.testing.assert_close(torch.from_numpy(scores), expected[rows], rtol=1e-5, atol=1e-6)


def test_some_responses_were_cut_off_and_some_were_finished():
    ends = [row[-1] for row in rows_as_they_are()]

    assert 0 < ends.count(train_tokenizer().eos_token_id) < len(ends)


# Rules, on one rank in this process.


def test_a_text_model_gets_plain_positions_instead_of_mrope(root, one_rank):
    batch = make_batch()
    batch.batch["position_ids"] = batch.batch["position_ids"][:, None].expand(-1, 4, -1)

    scores = make_scorer(root / "same").score(batch)

    torch.testing.assert_close(scores, torch.load(root / "expected.pt")["same"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "policy_model_type"), [("other", "llama"), ("same", "qwen2_vl")])
def test_media_are_refused_unless_the_reward_model_reads_them_as_the_policy_does(
    root, one_rank, name, policy_model_type
):
    batch = make_batch()
    batch.non_tensor_batch["multi_modal_data"][2] = {"images": ["a.png"], "videos": []}

    with pytest.raises(
        NotImplementedError, match=r"`worker.reward_model.model.model_path` .* images or videos"
    ):
        make_scorer(root / name, policy_model_type=policy_model_type).score(batch)


@torch.no_grad()
def test_an_image_is_read_as_the_policy_reads_it(tmp_path, one_rank):
    folder = save_tiny_model(tmp_path / "vision", "qwen2_5_vl", num_hidden_layers=1)
    body = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").model
    config, processor = AutoConfig.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    make_scalar(config, has_bias=False)
    model = auto_class(config).from_pretrained(folder, config=config)
    weight = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(1))
    model.score.weight.copy_(weight)
    model.save_pretrained(folder)  # names the class that it was made from in the config
    make_scalar(config, has_bias=False)
    config.save_pretrained(folder)

    media = MediaLoader(processor, MediaOptions(min_pixels=1, max_pixels=10**6))
    row = {"images": [{"bytes": image_bytes(84, 56)}], "videos": []}
    features = inputs_of(media, row)
    tokens = processor.tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>What colour?")
    ids = torch.tensor(media.expand(tokens, media.shape_of(media.decode(row))))
    grid = features["image_grid_thw"]
    positions = positions_of(config, ids, image_grid_thw=grid)  # (4, T)
    batch = DataProto.from_dict(
        {
            "input_ids": ids[None],
            "attention_mask": torch.ones_like(ids)[None],
            "position_ids": positions[None],
        },
        {"multi_modal_data": objects([row])},
    )

    scores = make_scorer(folder, policy_model_type="qwen2_5_vl", media=media).score(batch)

    inputs = {"pixel_values": features["pixel_values"], "image_grid_thw": grid}
    hidden = body(input_ids=ids[None], position_ids=positions[:, None], **inputs).last_hidden_state
    torch.testing.assert_close(scores, hidden[:, -1] @ weight[0], rtol=1e-4, atol=1e-5)


def test_scores_that_are_not_finite_are_refused(root, one_rank):
    scorer = make_scorer(root / "same")
    with torch.no_grad():
        scorer.forward.model.get_parameter("score.weight").fill_(float("inf"))

    with pytest.raises(ValueError, match=r"of 8 responses is not finite"):
        scorer.score(make_batch())


def test_other_tokens_need_a_chat_template(root, one_rank):
    scorer = make_scorer(root / "other")
    tokenizer = read_tokenizer(str(root / "other"))
    tokenizer.chat_template = None

    with pytest.raises(ValueError, match=r"no chat template: set `worker.reward_model.model.tokenizer_path`"):
        RewardModelScorer(
            scorer.forward, tokenizer, train_tokenizer(), scorer.config, policy_model_type="qwen2"
        )


def test_a_model_without_a_score_is_refused(tmp_path, one_rank):
    folder = save_tiny_model(tmp_path / "causal", "qwen2", num_hidden_layers=1)

    with pytest.raises(
        ValueError, match=r"must be a sequence-classification model .* got \['Qwen2ForCausalLM'\]"
    ):
        make_scorer(folder)


def test_a_classifier_of_several_labels_is_refused(tmp_path, one_rank):
    folder = save_reward_model(tmp_path / "classes", num_labels=3)

    with pytest.raises(
        ValueError, match=r"`worker.reward_model.model.model_path` .* 3 labels, one is needed"
    ):
        make_scorer(folder)
