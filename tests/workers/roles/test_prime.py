# SPDX-License-Identifier: Apache-2.0
"""The process reward model on gloo ranks against a padded float32 computation written from the formulas."""

import math

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.helpers.distributed import run_distributed
from verl.config.model import FSDPConfig, ModelConfig
from verl.config.worker import PrimeConfig
from verl.distributed.fsdp import make_mesh
from verl.models.tiny import save_tiny_model, train_tokenizer
from verl.protocol import DataProto
from verl.workers.model_builder import build_model
from verl.workers.packing.forward import PackedForward
from verl.workers.roles.prime import DataParallelPrimeModel, check_prime_tokenizer
from verl.workers.roles.updater import Training

PROMPT_LENGTH, RESPONSE_LENGTH, ROWS, N = 6, 8, 12, 3  # 4 prompts, 2 mini batches of 2
BETA = 0.4
MICRO_BATCHES = {
    "one row": {"micro_batch_size_per_device_for_update": 1, "dynamic_batching": False},
    "four rows": {"micro_batch_size_per_device_for_update": 4, "dynamic_batching": False},
    "dynamic": {"micro_batch_size_per_device_for_update": 1, "dynamic_batching": True},
}
METRICS = {
    *("dpo_loss", "accuracy", "score", "score_right", "score_wrong"),
    *("grad_norm", "skipped_updates", "lr"),
}


class RecordingOptimizer(torch.optim.SGD):
    """Keeps the gradients of every step and changes nothing."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.named = dict(model.named_parameters())
        self.gradients = []

    def step(self):
        self.gradients.append({name: param.grad.full_tensor() for name, param in self.named.items()})


def make_batch():
    """Rows of 0 to 8 response tokens, right and wrong ones and one half right; one has no response token."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(10, 250, (ROWS, PROMPT_LENGTH + RESPONSE_LENGTH), generator=generator)
    columns, rows = torch.arange(PROMPT_LENGTH + RESPONSE_LENGTH), torch.arange(ROWS)[:, None]
    end = PROMPT_LENGTH + (5 * rows + 1) % (RESPONSE_LENGTH + 1)
    mask = ((columns >= rows % 4) & (columns < end)).long()
    return DataProto.from_dict(
        {
            "input_ids": tokens * mask,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": (tokens * mask)[:, PROMPT_LENGTH:],
            "loss_mask": mask[:, PROMPT_LENGTH:],
            "accuracies": torch.tensor([1.0, 0, 0, 0.25, 1, 1, 0, 1, 0, 0, 1, 1]),
        }
    )


def make_prime(folder, reference, *, make_optimizer=RecordingOptimizer, **options):
    def forward(path, trainable):
        model = build_model(
            ModelConfig(model_path=str(path), enable_gradient_checkpointing=False),
            FSDPConfig(mp_param_dtype="fp32", torch_dtype="fp32"),
            mesh=make_mesh(dist.get_world_size(), -1, "cpu"),
            device="cpu",
            trainable=trainable,
        )
        return PackedForward(model, None, "cpu")

    trained = forward(folder, trainable=True)
    optimizer = make_optimizer(trained.model)
    options = {"global_batch_size": 2, "max_grad_norm": 1e9, "beta": BETA} | options
    return DataParallelPrimeModel(
        PrimeConfig(**options),
        trained,
        forward(reference, trainable=False),
        Training(
            optimizer,
            torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
            rollout_n=N,
            max_response_length=RESPONSE_LENGTH,
        ),
        accuracy_key="right",
    )


# The reference: one process, padded rows, full logits.


def padded_log_probs(model, batch):
    tensors = batch.batch
    logits = model(
        input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"],
        position_ids=tensors["position_ids"], use_cache=False,
    ).logits  # fmt: skip
    log_p = logits[:, PROMPT_LENGTH - 1 : -1].log_softmax(-1)
    return log_p.gather(-1, tensors["responses"][..., None])[..., 0] * tensors["loss_mask"]


def padded_update(model, batch, ref_log_probs):
    """Gradients of each mini batch, the mean loss, and statistics of every sequence."""
    gradients, losses, judged = [], [], []
    for start in (0, ROWS // 2):
        rows = slice(start, start + ROWS // 2)
        ratios = (padded_log_probs(model, batch[rows]) - ref_log_probs[rows]).sum(-1)
        terms = []
        for ratio, accuracy, mask in zip(
            ratios, batch.batch["accuracies"][rows], batch.batch["loss_mask"][rows], strict=True
        ):
            if not mask.any():
                continue
            right = 1 / (1 + (-BETA * ratio).exp())
            terms.append(-accuracy * right.log() - (1 - accuracy) * (1 - right).log())
            judged.append((BETA * ratio.item(), accuracy.item() > 0.5))
        loss = sum(terms) / len(terms)
        model.zero_grad()
        loss.backward()
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        losses.append(loss.item())
    return gradients, sum(losses) / 2, judged


def mean(values):
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("prime")
    models = []
    for seed, name in enumerate(("model", "reference")):
        save_tiny_model(root / name, "qwen2", seed=seed, num_hidden_layers=1)
        models.append(AutoModelForCausalLM.from_pretrained(root / name, attn_implementation="eager"))
    batch = make_batch()
    with torch.no_grad():
        ref_log_probs, log_probs = padded_log_probs(models[1], batch), padded_log_probs(models[0], batch)
    torch.save(
        (ref_log_probs, log_probs, *padded_update(models[0], batch, ref_log_probs)), root / "expected.pt"
    )
    return root


def run_on_ranks(rank, world_size, root):
    """For each cut: reference log-probs, process rewards, gradient errors and metrics of this rank."""
    expected = torch.load(root / "expected.pt")[2]
    size = ROWS // 2 // world_size
    rows = [mini * ROWS // 2 + rank * size + row for mini in range(2) for row in range(size)]
    results = {}
    for setting, options in MICRO_BATCHES.items():
        size = options["micro_batch_size_per_device_for_update"]
        prime = make_prime(
            root / "model", root / "reference", micro_batch_size_per_device_for_experience=size, **options
        )
        batch = make_batch()[rows]
        batch.batch["prime_ref_log_probs"] = prime.compute_ref_log_probs(batch)
        rewards = prime.compute_process_rewards(batch)
        metrics = prime.update(batch)
        worst = max(
            ((found[name] - grad).norm() / grad.norm()).item()
            for found, wanted in zip(prime.updater.optimizer.gradients, expected, strict=True)
            for name, grad in wanted.items()
        )
        results[setting] = (rows, batch.batch["prime_ref_log_probs"].numpy(), rewards.numpy(), worst, metrics)
    return results


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def results(request, root, one_rank):
    return (
        [run_on_ranks(0, 1, root)]
        if request.param == 1
        else run_distributed(run_on_ranks, request.param, root)
    )


@pytest.mark.parametrize("setting", MICRO_BATCHES)
def test_process_rewards_equal_a_padded_computation(results, root, setting):
    ref_log_probs, log_probs = torch.load(root / "expected.pt")[:2]
    expected = BETA * (log_probs - ref_log_probs)

    for rank in results:
        rows, found_ref, found, _, _ = rank[setting]
        torch.testing.assert_close(torch.from_numpy(found_ref), ref_log_probs[rows], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(found), expected[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("setting", MICRO_BATCHES)
def test_loss_and_gradients_equal_a_padded_computation(results, root, setting):
    loss = torch.load(root / "expected.pt")[3]

    for rank in results:
        *_, worst, metrics = rank[setting]
        assert worst < 1e-5
        assert metrics["prime/dpo_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("setting", MICRO_BATCHES)
def test_metrics_are_means_over_the_sequences_of_all_ranks(results, root, setting):
    judged = torch.load(root / "expected.pt")[4]
    assert len(judged) == ROWS - 1  # one has no response token
    expected = {
        "prime/accuracy": mean([(score > 0) == right for score, right in judged]),
        "prime/score": mean([score for score, _ in judged]),
        "prime/score_right": mean([score for score, right in judged if right]),
        "prime/score_wrong": mean([score for score, right in judged if not right]),
    }

    for rank in results:
        metrics = rank[setting][-1]
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        assert set(metrics) == {f"prime/{name}" for name in METRICS}


# Laws, on one rank in this process.


def with_reference(prime, batch):
    return batch.merge(DataProto.from_dict({"prime_ref_log_probs": prime.compute_ref_log_probs(batch)}))


def test_rewards_start_at_zero_and_learn_right_from_wrong(root, one_rank):
    prime = make_prime(
        root / "model",
        root / "model",
        make_optimizer=lambda model: torch.optim.Adam(model.parameters(), 1e-3),
    )
    batch = make_batch()
    batch = with_reference(
        prime, batch[[row for row in range(ROWS) if batch.batch["loss_mask"][row].any()]][:6]
    )
    assert prime.compute_process_rewards(batch).abs().max() < 1e-5

    history = [prime.update(batch) for _ in range(8)]

    assert history[0]["prime/dpo_loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert history[-1]["prime/dpo_loss"] < 0.5 * history[0]["prime/dpo_loss"]
    assert history[-1]["prime/accuracy"] == 1
    scores = prime.compute_process_rewards(batch).sum(-1)
    assert (scores > 0).tolist() == (batch.batch["accuracies"] > 0.5).tolist()


def test_the_reference_does_not_change(root, one_rank):
    prime = make_prime(
        root / "model", root / "model", make_optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1)
    )
    batch = with_reference(prime, make_batch())

    prime.update(batch)

    torch.testing.assert_close(
        prime.compute_ref_log_probs(batch), batch.batch["prime_ref_log_probs"], rtol=0, atol=0
    )
    assert prime.compute_process_rewards(batch).abs().max() > 1e-3


def test_nan_outside_of_the_responses_does_not_reach_the_update(root, one_rank):
    prime = make_prime(root / "model", root / "reference")
    clean = with_reference(prime, make_batch())
    dirty = with_reference(prime, make_batch())
    dirty.batch["prime_ref_log_probs"][dirty.batch["loss_mask"] == 0] = float("nan")

    assert prime.update(dirty) == prime.update(clean)
    assert prime.compute_process_rewards(dirty).isfinite().all()


def test_an_accuracy_outside_of_zero_to_one_is_refused_by_option(root, one_rank):
    prime = make_prime(root / "model", root / "reference")
    batch = with_reference(prime, make_batch())
    batch.batch["accuracies"][3] = 2.0

    with pytest.raises(ValueError, match=r"`algorithm.prime_accuracy_key` \(right\)"):
        prime.update(batch)


def test_rows_that_do_not_divide_into_mini_batches_are_refused_by_the_options_of_this_model(root, one_rank):
    prime = make_prime(root / "model", root / "reference", global_batch_size=3)

    with pytest.raises(ValueError, match=r"`worker.prime.global_batch_size` \(3 prompts"):
        prime.update(with_reference(prime, make_batch()))


def test_a_model_with_other_tokens_than_the_policy_is_refused():
    policy, other = train_tokenizer(), train_tokenizer(vocab_size=300)

    check_prime_tokenizer(train_tokenizer(), policy)
    with pytest.raises(
        ValueError, match=r"`worker.prime.model.model_path` must name a model with the tokens"
    ):
        check_prime_tokenizer(other, policy)
