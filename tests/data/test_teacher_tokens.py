# SPDX-License-Identifier: Apache-2.0
import pytest

from verl.config.distillation import DistillationConfig, TeacherConfig
from verl.data.bad_rows import BadRowError
from verl.data.readers import load_tokenizer
from verl.data.teachers import TeacherColumn, check_teacher_tokens, differences
from verl.models.tiny import save_tiny_model, train_tokenizer


def distillation(**teachers):
    return DistillationConfig(True, teacher_models=teachers)


def test_a_teacher_with_the_policys_tokenizer_is_accepted_whatever_its_size(tmp_path):
    teacher = TeacherConfig(str(save_tiny_model(tmp_path / "big", num_hidden_layers=3)))

    check_teacher_tokens(distillation(big=teacher), load_tokenizer(save_tiny_model(tmp_path / "policy")))


def test_a_teacher_with_other_tokens_is_refused_with_some_of_them(tmp_path):
    teacher = TeacherConfig(str(save_tiny_model(tmp_path / "other", "qwen3", words=("red", "blue"))))

    reason = r"must have the tokenizer of the policy: \d+ of \d+ tokens have another id or none"
    with pytest.raises(ValueError, match=f"`distillation.teacher_models.other` .* {reason}"):
        check_teacher_tokens(distillation(other=teacher), train_tokenizer())


def test_a_teacher_without_a_tokenizer_is_named_by_its_own_option(tmp_path):
    teacher = TeacherConfig(str(tmp_path / "missing"), tokenizer_path=str(tmp_path / "missing"))

    with pytest.raises(
        ValueError, match=r"^`distillation\.teacher_models\.big\.model_path` \(or `tokenizer_p"
    ):
        check_teacher_tokens(distillation(big=teacher), train_tokenizer())


def test_a_teacher_may_have_more_tokens_but_not_fewer():
    policy, larger = train_tokenizer(), train_tokenizer()
    larger.add_tokens(["<extra>"])

    assert list(differences(policy, larger)) == []
    (reason,) = differences(larger, policy)
    assert "1 of 455 tokens" in reason and "'<extra>' is 454 and None" in reason


def test_a_tokenizer_that_divides_texts_otherwise_is_refused():
    policy, other = train_tokenizer(), train_tokenizer()
    other.backend_tokenizer.model.dropout = 1.0  # no merges

    (reason,) = differences(policy, other)

    assert "it divides 'What is 12,345" in reason


def test_rows_go_to_the_teacher_that_their_column_names_and_others_are_refused():
    column = TeacherColumn.of(
        distillation(math=TeacherConfig("a", key="openai/gsm8k"), code=TeacherConfig("b"))
    )

    assert column.number({"data_source": "openai/gsm8k"}) == 0
    assert column.number({"data_source": "code"}) == 1
    problem = r"`data_source` must name a teacher, one of \['openai/gsm8k', 'code'\], got 'math'"
    with pytest.raises(BadRowError, match=problem):
        column.number({"data_source": "math"})


def test_one_teacher_needs_no_column():
    assert TeacherColumn.of(distillation(big=TeacherConfig("a"))) is None
