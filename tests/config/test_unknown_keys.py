# SPDX-License-Identifier: Apache-2.0
"""Suggestions for unknown keys: right, or none."""

import time

import pytest

from verl.config.hints.unknown_keys import MAX_KEY, QUOTED_OPTION, other_names, suggest
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, list_options, load_config
from verl.config.sft import SFTConfig

PPO = [entry.key for entry in list_options(PPOConfig)]
SFT = [entry.key for entry in list_options(SFTConfig)]


def option_for(key, options=PPO):
    found = suggest(key, options)
    return found.option if found else None


@pytest.mark.parametrize(
    ("written", "option"),
    [
        # a slip in the name
        ("trainer.save_frq", "trainer.save_freq"),
        ("trainer.savefreq", "trainer.save_freq"),
        ("trainer.nnode", "trainer.nnodes"),
        ("trainer.max_step", "trainer.max_steps"),
        ("trainer.log", "trainer.logger"),
        ("data.sed", "data.seed"),
        ("data.max_prompt_len", "data.max_prompt_length"),
        ("data.max_promptlength", "data.max_prompt_length"),
        ("data.Train_Files", "data.train_files"),
        ("algorithm.kl_coeff", "algorithm.kl_coef"),
        ("algorithm.advantage_estimator", "algorithm.adv_estimator"),
        ("algorithm.lambda", "algorithm.lam"),
        ("worker.prime.betta", "worker.prime.beta"),
        ("worker.rollout.tempersture", "worker.rollout.temperature"),
        ("worker.rollout.tensor_parallel", "worker.rollout.tensor_parallel_size"),
        # a slip in the section, or another one, or none
        ("workr.rollout.n", "worker.rollout.n"),
        ("worker.prim.beta", "worker.prime.beta"),
        ("rollout.n", "worker.rollout.n"),
        ("n", "worker.rollout.n"),
        ("lora.rank", "worker.actor.model.lora.rank"),
        ("worker.critic.weight_decay", "worker.critic.optim.weight_decay"),
        ("data.temperature", "worker.rollout.temperature"),
        # TRL's names, in its own or any section
        ("worker.actor.optim.learning_rate", "worker.actor.optim.lr"),
        ("worker.critic.optim.learning_rate", "worker.critic.optim.lr"),
        ("learning_rate", "worker.actor.optim.lr"),
        ("worker.rollout.num_generations", "worker.rollout.n"),
        ("algorithm.beta", "algorithm.kl_coef"),
        ("data.max_completion_length", "data.max_response_length"),
        ("per_device_train_batch_size", "worker.actor.micro_batch_size_per_device_for_update"),
        ("trainer.num_train_epochs", "trainer.total_epochs"),
        ("worker.actor.epsilon", "worker.actor.clip_ratio_low"),
        ("worker.actor.epsilon_high", "worker.actor.clip_ratio_high"),
        ("trainer.save_steps", "trainer.save_freq"),
        ("trainer.eval_steps", "trainer.val_freq"),
        ("trainer.report_to", "trainer.logger"),
        ("trainer.output_dir", "trainer.save_checkpoint_path"),
        ("trainer.vllm_gpu_memory_utilization", "worker.rollout.gpu_memory_utilization"),
        ("trainer.use_vllm", "worker.rollout.name"),
        # EasyR1's former names, and verl's in sections of this program
        ("worker.actor.ulysses_sequence_parallel_size", "worker.actor.ulysses_size"),
        ("worker.reward.compute_score", "worker.reward.reward_function"),
        ("worker.actor.ppo_mini_batch_size", "worker.actor.global_batch_size"),
        ("worker.critic.grad_clip", "worker.critic.max_grad_norm"),
        ("worker.actor.model.path", "worker.actor.model.model_path"),
        ("worker.reward.num_workers", "worker.reward.num_cpus"),
        ("worker.reward.reward_manager", "worker.reward.reward_type"),
        ("trainer.profiler", "trainer.profile_steps"),
        ("data.use_sequence_balance", None),
        # nothing is likely enough, or several are
        ("zzzz.qqqq", None),
        ("data.path", None),
        ("data.min_prompt_length", None),
        ("trainer.name", None),
        ("trainer.wandb", None),
        ("trainer.checkpoint_path", None),
        ("trainer.debug_mode", None),
        ("worker.actor.clip_ratio_max", None),
        ("worker.rollout.path", None),
        ("worker.rollout.engine", None),
        ("data.no_shuffle", None),
    ],
)
def test_a_key_is_answered_with_the_option_that_was_meant_or_with_none(written, option):
    assert option_for(written) == option


@pytest.mark.parametrize(
    ("written", "option"),
    [
        ("learning_rate", "worker.actor.optim.lr"),
        ("data.max_seq_length", "data.max_length"),
        ("data.max_prompt_length", "data.max_length"),
        ("num_generations", None),
        ("worker.rollout.n", None),
        ("batch_size", None),
    ],
)
def test_an_option_that_the_run_lacks_is_never_suggested(written, option):
    assert option_for(written, SFT) == option


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "logging_steps", "batch_size"])
def test_a_name_without_counterpart_is_answered_with_the_reason(name):
    found = suggest(f"worker.rollout.{name}", PPO)

    assert found.option is None
    assert f"`{name}` has no counterpart here: " in found.text


def test_the_answer_says_whose_name_it_is_and_the_difference():
    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig, ["algorithm.beta=0.1", "worker.rollout.engine=vllm", "x=1"])

    assert raised.value.problems[:3] == [
        "`x` is not an option; `--help` lists the options",
        "`worker.rollout.engine` is not an option; `--help worker.rollout` lists the options",
        "`algorithm.beta` is not an option; TRL's `beta` is `algorithm.kl_coef` here:"
        " `algorithm.use_kl_loss=true` adds it to the loss; a run has a reference model unless"
        " `algorithm.disable_kl=true`, which is TRL's default of 0",
    ]


def test_every_other_name_leads_to_options_that_exist():
    everything = set(PPO) | set(SFT)

    def exists(end):
        return end in everything or any(option.endswith(f".{end}") for option in everything)

    entries = other_names()
    assert [name for name, entry in entries.items() if not all(map(exists, entry.options))] == []
    assert [name for name, entry in entries.items() if not entry.options and not entry.note] == []
    notes = {option for entry in entries.values() for option in QUOTED_OPTION.findall(entry.note)}
    assert sorted(notes - everything) == [
        "worker.actor.fsdp",  # a section
        "worker.actor.optim",
        "worker.rollout",
        "worker.rollout.val_override_config.n",  # in a mapping
    ]


@pytest.mark.nightly
def test_an_option_is_not_suggested_for_itself_and_survives_every_dropped_letter():
    # A name with a letter missing leads back to the option itself, or at least to no other one.
    for option in {option.rpartition(".")[2]: option for option in PPO}.values():
        section, _, name = option.rpartition(".")
        if len(name) < 6:
            continue
        for index in range(1, len(name), 3):
            typed = f"{section}.{name[:index]}{name[index + 1 :]}"
            assert typed in PPO or option_for(typed) in (option, None), typed


def test_a_long_key_takes_no_time():
    started = time.process_time()

    assert suggest("a." * MAX_KEY + "n", PPO) is None
    suggest("worker." + "_".join(["num"] * 40), PPO)

    assert time.process_time() - started < 2


@pytest.mark.parametrize("config_class", [PPOConfig, SFTConfig])
@pytest.mark.parametrize("written", ["teacher_models.a.{}", "distillation.teacher_model.a.{}"])
@pytest.mark.parametrize("option", ["model_path", "key", "fsdp.fsdp_size"])
def test_an_option_of_a_named_section_is_found_without_its_whole_section(config_class, written, option):
    with pytest.raises(ConfigError) as raised:
        load_config(config_class, [f"{written.format(option)}=2"])

    key = written.format(option)
    assert f"`{key}` is not an option; did you mean `distillation.teacher_models.a.{option}`?" in (
        raised.value.problems
    )
    assert any(
        each.startswith("`worker.actor.model.model_path` must be set") for each in raised.value.problems
    )


def test_a_named_section_is_guessed_only_by_its_name():
    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig, ["trainer.url=x"])

    assert "`trainer.url` is not an option; `--help trainer` lists the options" in raised.value.problems
