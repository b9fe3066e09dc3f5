# SPDX-License-Identifier: Apache-2.0
"""Scalar models as workers build them, on one and on two FSDP2 ranks, and what is exported of them."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import distribute_tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from tests.equivalence.test_packed_forward import (
    CLIP,
    IMAGE,
    Features,
    as_batch,
    load,
    text_rows,
    vision_batch,
)
from tests.equivalence.test_packed_statistics import TEMPERATURE, padded_log_p
from tests.equivalence.test_scalar_forward import (
    PlainScalar,
    classified,
    expected_last_values,
    expected_values,
)
from tests.helpers.checkpoints import save_shards
from tests.helpers.distributed import run_distributed
from verl.checkpoint.merger import merge_checkpoint
from verl.checkpoint.sharded import load_shards, save_huggingface_files
from verl.config.model import FSDPConfig, ModelConfig
from verl.distributed.fsdp import make_mesh, sharded_parameters
from verl.models.registry import check_model
from verl.models.tiny import save_tiny_model
from verl.workers.model_builder import build_model
from verl.workers.packing.forward import PackedForward

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("verl/workers", "verl/models/scalar_head.py")]

FAMILIES = ("qwen2", "qwen2_5_vl")
FP32 = FSDPConfig(mp_param_dtype="fp32", torch_dtype="fp32")
# The rows of each rank's micro batches by world size: media and text, nothing at the end.
PARTS = {1: [[[0, 1, 2], [3, 4, 5], []]], 2: [[[0, 1], [2], [3]], [[4], [5], []]]}
CONTENTS = [((IMAGE,), 5), ((), 4), ((IMAGE, CLIP), 6), ((), 3), ((), 7), ((CLIP,), 2)]


def built(folder, fsdp=FP32, trainable=True, head="scalar", role="critic", **options):
    mesh = make_mesh(torch.distributed.get_world_size(), -1, "cpu")
    config = ModelConfig(model_path=str(folder), **options)
    return build_model(
        config, fsdp, mesh=mesh, device="cpu", trainable=trainable, head=head, option=f"worker.{role}.model"
    )


def packed(model):
    return PackedForward(model, Features())


def batch_of(folder, family):
    if family == "qwen2":
        return as_batch(text_rows(tuple((11, response) for _, response in CONTENTS)))
    return vision_batch(folder, CONTENTS)


def score_of(size):
    return torch.randn(1, size, generator=torch.Generator().manual_seed(3))


def weights_of(batch):
    return torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))


def value_loss(values, last, weights):
    return (values * weights).sum() + (last * weights[:, 0]).sum()


def gathered_gradients(model):
    found = {}
    for name, parameter in sharded_parameters(model).items():
        found[name] = None if parameter.grad is None else parameter.grad.full_tensor().numpy()
    return found


@torch.no_grad()
def set_score(model):
    weight = sharded_parameters(model)["score.weight"]
    whole = score_of(weight.shape[1])
    weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None))


def scalar_results(rank, world_size, family, folder, target):
    """A critic from a language model: its first values, then with another score gradients and an export."""
    model, batch = built(folder), batch_of(folder, family)
    forward, weights = packed(model), weights_of(batch)
    found = {"first": float(forward.values(batch).detach().abs().max()), "names": list(model.state_dict())}
    found["difference"] = check_model(model)
    found["rough"] = check_model(built(folder, FSDPConfig(), trainable=True))
    set_score(model)
    for rows in PARTS[world_size][rank]:
        loss = value_loss(forward.values(batch[rows]), forward.last_values(batch[rows]), weights[rows])
        (loss * world_size).backward()
    found["gradients"] = gathered_gradients(model)
    with torch.no_grad():
        found["values"], found["last"] = forward.values(batch).numpy(), forward.last_values(batch).numpy()
    save_shards(target / family, model)
    resumed = built(folder)
    load_shards(target / family, resumed)
    with torch.no_grad():
        found["resumed"] = packed(resumed).values(batch).numpy()
    if rank == 0:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        save_huggingface_files(target / family, model.config, model.generation_config, tokenizer)
    return found


def kl_gradients(rank, world_size, family, folder, other):
    """Gradients of the full KL to a sharded reference."""
    model, reference = built(folder, head="causal"), built(other, trainable=False, head="causal")
    forward, batch = packed(model), batch_of(folder, family)
    weights = weights_of(batch)
    for rows in PARTS[world_size][rank]:
        result = forward.log_probs(batch[rows], TEMPERATURE, reference=packed(reference))
        ((result.kl * weights[rows]).sum() * world_size).backward()
    assert all(parameter.grad is None for parameter in sharded_parameters(reference).values())
    return gathered_gradients(model)


def observe(rank, world_size, folders, others, target):
    return {
        family: (
            scalar_results(rank, world_size, family, folders[family], target / str(world_size)),
            kl_gradients(rank, world_size, family, folders[family], others[family]),
        )
        for family in FAMILIES
    }


def read_again(folders, exported, classifiers, wrong, target):
    """Build from exports and from transformers' classifiers; what is refused, and how."""
    found = {}
    trained = built(classifiers["bias"])
    save_shards(target / "bias", trained)
    save_huggingface_files(target / "bias", trained.config)
    for family, folder in exported.items():
        model = built(folder)
        with torch.no_grad():
            found[family] = packed(model).values(batch_of(folders[family], family)).numpy()
    for name, folder in classifiers.items():
        model, batch = built(folder, trainable=False, role="reward_model"), batch_of(folder, "qwen2")
        values, last = packed(model).values(batch).numpy(), packed(model).last_values(batch).numpy()
        found[name] = (values, last, model.config.architectures)
    found["errors"] = []
    for folder, options in wrong:
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            built(folder, role="reward_model", **options)
        found["errors"].append(str(caught.value))
    return found


def alone(rank, world_size, folders, others, target, exported, usable, wrong):
    seen = observe(rank, world_size, folders, others, target)
    return seen, read_again(folders, exported, usable, wrong, target)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    root = tmp_path_factory.mktemp("references")
    return {family: save_tiny_model(root / family, family, seed=1) for family in FAMILIES}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def classifiers(folders, tmp_path_factory):
    """transformers' own classifiers with random scores, without and with a bias, and one of three labels."""
    root = tmp_path_factory.mktemp("classifiers")
    made = {}
    for name, auto, labels in (
        ("sequence", AutoModelForSequenceClassification, 1),
        ("bias", AutoModelForTokenClassification, 1),
        ("three", AutoModelForSequenceClassification, 3),
    ):
        torch.manual_seed(5)
        model = auto.from_pretrained(folders["qwen2"], num_labels=labels, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.score.parameters():
                parameter.normal_()
        model.save_pretrained(root / name)
        AutoTokenizer.from_pretrained(folders["qwen2"]).save_pretrained(root / name)
        made[name] = root / name
    return made


@pytest.fixture(scope="module")
def two_ranks(folders, others, target):
    return run_distributed(observe, 2, folders, others, target)


@pytest.fixture(scope="module")
def one_rank(two_ranks, target, folders, others, classifiers):
    """The same on one rank, and what it reads of the two ranks' exports."""
    exported = {family: merge_checkpoint(target / "2" / family) for family in FAMILIES}
    usable = {name: classifiers[name] for name in ("sequence", "bias")}
    wrong = [
        (classifiers["sequence"], {"head": "causal"}),
        (classifiers["three"], {}),
        (folders["qwen2"], {"trainable": False}),
    ]
    [found] = run_distributed(alone, 1, folders, others, target, exported, usable, wrong)
    return found


@pytest.fixture(scope="module")
def ranks(one_rank, two_ranks):
    return [one_rank[0], *two_ranks]


@pytest.fixture(scope="module")
def again(one_rank):
    return one_rank[1]


def relative_difference(ours, theirs):
    size = sum(np.square(value, dtype=np.float64).sum() for value in theirs.values())
    difference = sum(np.square(ours[name] - value, dtype=np.float64).sum() for name, value in theirs.items())
    return (difference / size) ** 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_starts_at_zero_with_a_score_that_is_not_tied_to_the_embedding(ranks, family):
    for found, _ in (result[family] for result in ranks):
        assert found["first"] == 0.0
        assert "score.weight" in found["names"] and "score.bias" not in found["names"]
        assert not any("lm_head" in name for name in found["names"])


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_one_padded_process(ranks, folders, family):
    batch = batch_of(folders[family], family)
    plain = PlainScalar(folders[family], torch.nn.Linear(128, 1, bias=False))
    plain.score.weight.data.copy_(score_of(128))
    everywhere = plain(batch)
    values, last = expected_values(everywhere, batch), expected_last_values(everywhere, batch)
    value_loss(values, last, weights_of(batch)).backward()
    expected = {name: p.grad.numpy() for name, p in plain.named_parameters() if p.grad is not None}

    for found, _ in (result[family] for result in ranks):
        np.testing.assert_allclose(found["values"], values.detach(), atol=3e-5)
        np.testing.assert_allclose(found["last"], last.detach(), atol=3e-5)
        assert relative_difference(found["gradients"], expected) < 1e-5
        assert np.array_equal(found["resumed"], found["values"])  # from its own checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_the_full_kl_is_that_of_one_padded_process(ranks, folders, others, family):
    batch = batch_of(folders[family], family)
    plain = load(folders[family], False)
    log_p = padded_log_p(plain, batch)
    log_q = padded_log_p(load(others[family], False), batch).detach()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).float() * batch.batch["loss_mask"]
    (kl * weights_of(batch)).sum().backward()
    expected = {name: p.grad.numpy() for name, p in plain.named_parameters() if p.grad is not None}

    for _, gradients in (result[family] for result in ranks):
        assert relative_difference(gradients, expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_of_scalar_models_runs_under_fsdp_and_mixed_precision(ranks, family):
    for found, _ in (result[family] for result in ranks):
        assert found["difference"] < 1e-4
        assert 0 < found["rough"] < 0.15


def test_an_exported_critic_is_a_sequence_classifier_of_transformers(again, ranks, target, folders):
    batch = batch_of(folders["qwen2"], "qwen2")
    model, info = AutoModelForSequenceClassification.from_pretrained(
        target / "2" / "qwen2" / "huggingface", output_loading_info=True
    )

    assert not info["missing_keys"] and not info["unexpected_keys"]
    np.testing.assert_allclose(classified(model, batch), ranks[-1]["qwen2"][0]["last"], atol=3e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_critic_is_loaded_with_its_score(again, ranks, target, family):
    config = AutoConfig.from_pretrained(target / "2" / family / "huggingface")

    assert config.architectures[0].endswith("ForSequenceClassification")
    assert config.num_labels == 1
    np.testing.assert_allclose(again[family], ranks[-1][family][0]["values"], atol=1e-6)


def test_scores_of_transformers_classifiers_are_read_with_and_without_bias(again, classifiers):
    batch = batch_of(classifiers["sequence"], "qwen2")
    inputs = {key: batch.batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
    sequence = AutoModelForSequenceClassification.from_pretrained(classifiers["sequence"])
    token = AutoModelForTokenClassification.from_pretrained(classifiers["bias"])

    with torch.no_grad():
        values = expected_values(token.eval()(**inputs).logits[..., 0], batch)

    np.testing.assert_allclose(again["sequence"][1], classified(sequence, batch), atol=3e-5)
    np.testing.assert_allclose(again["bias"][0], values, atol=3e-5)
    assert again["sequence"][2] == ["Qwen2ForSequenceClassification"]
    assert again["bias"][2] == ["Qwen2ForTokenClassification"]


def test_models_with_the_wrong_head_are_refused(again, classifiers, folders):
    policy, labels, silent = again["errors"]

    assert f"`worker.reward_model.model.model_path` ({classifiers['sequence']})" in policy
    assert "Qwen2ForSequenceClassification, which cannot generate text" in policy
    assert "with 3 labels, one is needed" in labels
    assert f"({folders['qwen2']}) must be a sequence-classification model with one label" in silent


def test_an_export_with_a_bias_is_a_token_classifier(again, classifiers, target):
    exported = merge_checkpoint(target / "bias")

    model, info = AutoModelForTokenClassification.from_pretrained(exported, output_loading_info=True)

    original = AutoModelForTokenClassification.from_pretrained(classifiers["bias"])
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(model.score.weight, original.score.weight)
    assert torch.equal(model.score.bias, original.score.bias)
