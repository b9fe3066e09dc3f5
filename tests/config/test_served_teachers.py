# SPDX-License-Identifier: Apache-2.0
"""Teachers behind servers: what is wrong before anything starts."""

import pytest

from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config
from verl.config.sft import SFTConfig
from verl.planning.planned_run import planned_ppo
from verl.rewards.servers import specs_of

TEACHER, SERVER = "distillation.teacher_models.big", "reward_servers.own"
LOSS = "distillation.distillation_loss"
SERVED = [
    f"{TEACHER}.server=own", f"{TEACHER}.tokenizer_path=owner/big", f"{SERVER}.kind=teacher",
    f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.use_task_rewards=false", "distillation.enabled=true",
]  # fmt: skip
BY_URL = f"{SERVER}.url=http://host/v1"
COMMON = [
    "data.train_files=owner/rows", "data.val_files=owner/rows", "trainer.n_gpus_per_node=2",
    "worker.actor.model.model_path=owner/model", "worker.rollout.tensor_parallel_size=1",
    "worker.rollout.n=2", "algorithm.disable_kl=true",
]  # fmt: skip


def load(folder, *arguments):
    return load_config(PPOConfig, [*COMMON, f"trainer.save_checkpoint_path={folder}/run", *arguments])


def test_a_served_teacher_needs_no_reward_function_and_is_neither_planned_nor_handed_to_one(tmp_path):
    config = load(tmp_path, *SERVED, BY_URL)

    assert [model.role for model in planned_ppo(config).models if model.is_teacher] == []
    assert list(config.distillation.served) == ["big"] and not config.distillation.loaded
    assert specs_of(config.reward_servers) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([BY_URL, f"{LOSS}.loss_mode=reverse_kl"], "(reverse_kl) needs the teacher's whole distribution"),
        (
            [BY_URL, f"{LOSS}.loss_mode=reverse_kl_topk"],
            "needs the logarithm of the probability of all",
        ),
        ([BY_URL, "worker.rollout.temperature=0.7"], "`worker.rollout.temperature` must be 1 with"),
        ([BY_URL, f"{SERVER}.kind=chat"], "`reward_servers.own` of another kind: set"),
        (
            [BY_URL, f"{TEACHER}.server=other"],
            "must name a model of `reward_servers` with `kind=teacher`",
        ),
        ([BY_URL, f"{TEACHER}.tokenizer_path=null"], "`distillation.teacher_models.big.tokenizer_path` must"),
        ([BY_URL, f"{TEACHER}.model_path=owner/big"], "model_path` must be null with"),
        (
            [BY_URL, f"{TEACHER}.num_video_frames=8", f"{TEACHER}.max_prompt_length=9"],
            "about text only",
        ),
        ([BY_URL, f"{SERVER}.cache_dir=cache"], "`reward_servers.own.cache_dir` has no effect"),
        ([f"{SERVER}.model_path=owner/big"], "`reward_servers.own.colocate` must be false"),
        (
            [f"{SERVER}.model_path=owner/big", f"{SERVER}.colocate=false", f"{SERVER}.max_model_len=9"],
            "`reward_servers.own.max_model_len` (9) must be at least",
        ),
    ],
)
def test_what_a_server_cannot_give_is_refused_with_the_remedy(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, *SERVED, *arguments)

    assert any(message in problem for problem in raised.value.problems), raised.value.problems


def test_a_served_teacher_that_nothing_asks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"`reward_servers.own` has `kind=teacher`, and nothing asks it"):
        load(tmp_path, f"{SERVER}.kind=teacher", BY_URL)


def test_fine_tuning_loads_its_teachers(tmp_path):
    with pytest.raises(ConfigError, match=r"big\.server` must be null in fine-tuning"):
        load_config(SFTConfig, [
            "data.train_files=owner/rows", "worker.actor.model.model_path=owner/model",
            f"trainer.save_checkpoint_path={tmp_path}/run", f"{TEACHER}.server=own",
            "distillation.enabled=true", f"{TEACHER}.tokenizer_path=owner/big",
        ])  # fmt: skip
