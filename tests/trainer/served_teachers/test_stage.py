# SPDX-License-Identifier: Apache-2.0
"""Questions to teachers behind servers, and the columns and errors that their answers become."""

import json
import math
from contextlib import nullcontext

import pytest
import torch

from tests.helpers.chat_server import ChatServer, Reply
from verl.config.distillation import DistillationLossConfig
from verl.models.head.logit_chunks import HeadLogits
from verl.models.head.top_tokens import Places
from verl.protocol import DataProto, objects
from verl.trainer.served_teachers import ServedTeachers, TeacherModel
from verl.workers.roles.teachers import Teachers, log_of_others

SAMPLED = DistillationLossConfig("low_var_kl")


def log_prob(token):
    return -token / 8


def answers(body):
    """The log-probs of a prompt: of its tokens, and of the most likely ones, which are 1, 2, ..."""
    tokens = [{token, *range(1, body["prompt_logprobs"] + 1)} for token in body["prompt"]]
    entries = [{str(one): {"logprob": log_prob(one), "rank": one} for one in each} for each in tokens]
    return Reply(body=json.dumps({"choices": [{"prompt_logprobs": [None, *entries[1:]]}]}))


def make_batch(**columns):
    """Prompts (3, 2), padded on the left, and responses (3, 3), padded on the right."""
    ids = torch.tensor([[0, 9, 5, 6, 0], [8, 9, 7, 0, 0], [8, 9, 5, 6, 7]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    tensors = {"input_ids": ids, "attention_mask": mask, "responses": ids[:, 2:]}
    return DataProto.from_single_dict(tensors | columns)


def add(server, batch, loss=SAMPLED, number=0, **options):
    teacher = TeacherModel(server.url, "served", "math", **options)
    return ServedTeachers({number: teacher}, loss).add_to(batch)


def test_a_server_is_asked_about_each_row_without_padding():
    with ChatServer(answers) as server:
        added = add(server, make_batch()).batch["teacher_log_probs"]

    asked = sorted(server.requests, key=lambda body: body["prompt"])
    assert [body["prompt"] for body in asked] == [[8, 9, 5, 6, 7], [8, 9, 7], [9, 5, 6]]
    assert asked[0] == {
        "model": "served", "prompt": [8, 9, 5, 6, 7], "max_tokens": 1, "temperature": 1.0,
        "prompt_logprobs": 0,
    }  # fmt: skip
    expected = [[log_prob(5), log_prob(6), 0], [log_prob(7), 0, 0], [log_prob(5), log_prob(6), log_prob(7)]]
    torch.testing.assert_close(added, torch.tensor(expected))


def test_rows_of_other_teachers_keep_what_those_have_said():
    given = torch.full((3, 3), -9.0)
    batch = make_batch(teacher_ids=torch.tensor([0, 1, 0]), teacher_log_probs=given)

    with ChatServer(answers) as server:
        added = add(server, batch, number=1).batch["teacher_log_probs"]

    assert len(server.requests) == 1
    assert added.tolist() == [[-9.0] * 3, [log_prob(7), -9.0, -9.0], [-9.0] * 3]


def test_the_most_likely_tokens_are_sorted_and_leave_the_sampled_one_out():
    with ChatServer(answers) as server:
        added = add(server, make_batch(), DistillationLossConfig("forward_kl_topk", topk=2)).batch

    assert added["teacher_top_ids"].dtype == torch.int32
    assert added["teacher_top_ids"][2].tolist() == [[1, 2]] * 3
    assert added["teacher_top_log_probs"][1].tolist() == [[log_prob(1), log_prob(2)], [0, 0], [0, 0]]


def test_all_other_tokens_have_what_the_most_likely_ones_leave():
    top = torch.tensor([[0.5, 0.25], [1.0, 0.0]]).log()

    others = log_of_others(top)

    assert others[0].item() == pytest.approx(math.log(0.25))
    assert others[1].item() == pytest.approx(math.log(2**-23))


def test_a_busy_server_is_asked_again_and_no_more_at_once_than_allowed():
    with ChatServer(Reply("busy", 503), answers) as server:
        add(server, make_batch(), max_concurrency=1)

    assert len(server.requests) == 4
    assert server.most_running == 1


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (
            Reply("no", 503),
            RuntimeError,
            "status 503 in up to 1 attempts: .*lower `max_concurrency`$",
        ),
        (Reply("too long", 400), ValueError, "status 400: too long: its `--max-model-len` must exceed"),
        (Reply("hello"), RuntimeError, "answered without `prompt_logprobs`: serve it with vLLM"),
        (
            Reply(body='{"choices": [{"prompt_logprobs": [null]}]}'),
            RuntimeError,
            "answered about 1 tokens, and was asked about",
        ),
    ],
)
def test_errors_name_the_teacher_and_its_address(reply, error, message):
    with ChatServer(reply) as server, pytest.raises(error, match=message) as raised:
        add(server, make_batch(), max_retries=0)

    assert f"the teacher `math` ('served' at {server.url})" in str(raised.value)


def test_a_teacher_that_leaves_the_token_out_is_an_error():
    entries = [None, *({"3": {"logprob": -1.0}} for _ in range(4))]
    reply = Reply(body=json.dumps({"choices": [{"prompt_logprobs": entries}]}))

    with ChatServer(reply) as server, pytest.raises(RuntimeError, match="gave 1 log-probs at token 5, which"):
        add(server, make_batch()[2:])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"5": {"logprob": math.nan}}, "the log-prob nan of token 5 at token 5"),
        ({"5": {"logprob": -1.0}, "1": {"logprob": 5}}, "the log-prob 5.0 of token 1"),
        ({"5": {"logprob": -1e300}}, "the log-prob -1e[+]300 of token 5"),
        ({"5": {"logprob": -1.0}, "-1": {"logprob": -1}}, "of token -1 .*from 0 to"),
        ({"5": {"logprob": -1.0}, str(10**12): {"logprob": -1}}, f"of token {10**12}"),
        ({"5": {"rank": 1}}, "gave no log-probs at token 5, but .*rank"),
        ({"5": None}, "gave no log-probs"),
        ({"5": {"logprob": 10**400}}, "gave no log-probs"),
        ({"five": {"logprob": -1}}, "gave no log-probs"),
        (None, "gave no log-probs"),
        (7, "gave no log-probs"),
    ],
)
def test_what_is_no_log_prob_is_an_error_with_the_name_of_the_teacher(entries, message):
    reply = Reply(body=json.dumps({"choices": [{"prompt_logprobs": [None, *[entries] * 4]}]}))

    with ChatServer(reply) as server, pytest.raises(RuntimeError, match=f"the teacher `math` .*{message}"):
        add(server, make_batch()[2:])


def test_rows_with_media_are_refused_before_any_request():
    batch = make_batch(multi_modal_data=objects([None, None, {"images": ["a.png"]}]))

    with ChatServer(answers) as server, pytest.raises(ValueError, match=r"math\.server` is asked about text"):
        add(server, batch)

    assert server.requests == []


@pytest.mark.parametrize(("largest", "is_known"), [(63, True), (64, False)])
def test_a_token_that_the_policy_does_not_have_is_an_error_with_the_name_of_its_teacher(largest, is_known):
    teachers = Teachers({"code": None, "math": None}, DistillationLossConfig("forward_kl_topk", topk=2))
    micro = DataProto.from_single_dict(
        {
            "loss_mask": torch.tensor([[1]]),
            "teacher_ids": torch.tensor([1]),
            "teacher_top_ids": torch.tensor([[[3, largest]]]),
            "teacher_top_log_probs": torch.tensor([[[-0.5, -2.0]]]),
        }
    )
    divergence = teachers.divergence(micro, temperature=1.0)
    none, first = torch.tensor([], dtype=torch.int64), torch.tensor([0])
    places = [Places(none, none), Places(first, first)]  # the token is one of math's
    policy = HeadLogits(torch.ones(1, 2), torch.zeros(64, 2))
    message = (
        "the teacher `math` finds token 64 likely, and the policy's vocabulary has 64.*_models.math.model_"
    )

    with nullcontext() if is_known else pytest.raises(ValueError, match=message):
        divergence(policy, places)
