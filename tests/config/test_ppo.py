# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.helpers.training import SAMPLERS
from verl.config.files.paths import function_in_file
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, config_notes, load_config
from verl.config.worker import OPEN_ENDED


@pytest.fixture
def minimal(tmp_path):
    """Return the options without a usable default, for two ranks."""
    reward = tmp_path / "reward.py"
    reward.write_text("def main(rows): ...")
    return [
        "data.train_files=owner/rows",
        "data.val_files=owner/rows@test",
        "data.rollout_batch_size=8",
        "worker.actor.model.model_path=owner/model",
        "worker.actor.global_batch_size=4",
        "worker.actor.micro_batch_size_per_device_for_update=2",
        "worker.actor.micro_batch_size_per_device_for_experience=2",
        "worker.rollout.n=2",
        "worker.rollout.tensor_parallel_size=1",
        f"worker.reward.reward_function={reward}",
        "trainer.n_gpus_per_node=2",
        f"trainer.save_checkpoint_path={tmp_path}/checkpoints",
    ]


def load(minimal, *arguments):
    return load_config(PPOConfig, [*minimal, *arguments])


def problems_of(minimal, *arguments):
    with pytest.raises(ConfigError) as raised:
        load(minimal, *arguments)
    return raised.value.problems


def test_the_minimal_config_loads(minimal):
    config = load(minimal)

    assert (config.world_size, config.dp_size, config.num_engines, config.loader_batch_size) == (2, 2, 2, 8)
    assert config.max_sequence_length == config.max_model_len == 1024
    assert config.worker.actor.model.tokenizer_path == "owner/model"


def test_an_empty_path_in_a_file_is_no_path(minimal, tmp_path):
    # Long-RL's default of `cached_embeds_dir`; the working directory would fill with frames and features.
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {cache_dir: '', image_dir: '', format_prompt: ''}\n"
        "worker: {actor: {cached_embeds_dir: '', model: {tokenizer_path: ''}}}\n"
        "trainer: {save_checkpoint_path: '', load_checkpoint_path: '', ray_timeline: ''}\n"
    )

    config = load_config(PPOConfig, [*minimal[:-1], f"config={file}"])

    data, actor, trainer = config.data, config.worker.actor, config.trainer
    assert (data.cache_dir, data.image_dir, data.format_prompt, actor.cached_embeds_dir) == (None,) * 4
    assert (trainer.load_checkpoint_path, trainer.ray_timeline) == (None, None)
    assert trainer.checkpoint_folder.endswith("checkpoints/easy_r1/demo")
    assert actor.model.tokenizer_path == "owner/model"


@pytest.mark.parametrize("bounds", [(None, None), (None, 100), (100, None)])
def test_the_pixels_of_media_may_be_unbounded(minimal, bounds):
    words = ["null" if bound is None else bound for bound in bounds]

    config = load(minimal, f"data.min_pixels={words[0]}", f"data.max_pixels={words[1]}")

    assert (config.data.min_pixels, config.data.max_pixels) == bounds


def test_variables_of_the_chat_template_do_not_replace_what_the_trainer_sets(minimal):
    config = load(minimal, "data.apply_chat_template_kwargs.enable_thinking=false")

    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    (problem,) = problems_of(minimal, "data.apply_chat_template_kwargs.tokenize=true")
    assert problem.startswith("`data.apply_chat_template_kwargs.tokenize` must not be set")


def test_options_without_a_usable_default_must_be_set():
    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig)

    text = str(raised.value)
    for key in (
        "worker.actor.model.model_path",
        "data.train_files",
        "data.val_files",
        "worker.reward.reward_function",
        "worker.rollout.n",
    ):
        assert f"`{key}` must be" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["worker.rollout.n=1"],
            "`worker.rollout.n` must be at least 2 with `algorithm.adv_estimator=grpo`, got 1",
        ),
        (
            ["worker.actor.global_batch_size=3", "worker.rollout.n=4"],
            "`data.rollout_batch_size` (8) must be divisible by `worker.actor.global_batch_size` (3):"
            " set `worker.actor.global_batch_size=2`, or set `data.rollout_batch_size=6` or"
            " `data.rollout_batch_size=9`",
        ),
        (
            ["worker.actor.micro_batch_size_per_device_for_experience=3"],
            "`data.rollout_batch_size` x `worker.rollout.n` (16) must be divisible by"
            " `worker.actor.micro_batch_size_per_device_for_experience` (3)",
        ),
        (
            ["worker.actor.micro_batch_size_per_device_for_update=3"],
            "`worker.actor.global_batch_size` x `worker.rollout.n` / `trainer.nnodes` x"
            " `trainer.n_gpus_per_node` (4) must be divisible by"
            " `worker.actor.micro_batch_size_per_device_for_update` (3)",
        ),
        (
            ["worker.actor.global_batch_size=1", "worker.rollout.n=3"],
            "`worker.actor.global_batch_size` x `worker.rollout.n` (3) must be divisible by the number of",
        ),
        (
            ["worker.rollout.tensor_parallel_size=4"],
            "`trainer.nnodes` x `trainer.n_gpus_per_node` (2) must be divisible by"
            " `worker.rollout.tensor_parallel_size` (4): set `worker.rollout.tensor_parallel_size=2`,"
            " or make `trainer.nnodes` x `trainer.n_gpus_per_node` 4",
        ),
        (
            ["worker.rollout.tensor_parallel_size=2", "trainer.n_gpus_per_node=1"],
            "set `worker.rollout.tensor_parallel_size=1`, or make `trainer.nnodes` x",
        ),
        (
            ["data.mini_rollout_batch_size=6"],
            "`data.rollout_batch_size` (8) must be divisible by `data.mini_rollout_batch_size` (6)",
        ),
        (
            ["data.mini_rollout_batch_size=1"],
            "/ `worker.rollout.tensor_parallel_size` (2): make the number of rollout engines 1, or set"
            " `data.mini_rollout_batch_size=2`",
        ),
        (
            ["data.max_response_length=8000", "worker.rollout.enable_chunked_prefill=false"],
            "`worker.rollout.max_num_batched_tokens` (8192) must be at least"
            " `data.max_prompt_length` + `data.max_response_length` (8512)",
        ),
        (["worker.rollout.max_model_len=1000"], "`worker.rollout.max_model_len` (1000) must be at least"),
        (
            ["worker.rollout.max_num_seqs=9000"],
            "`worker.rollout.max_num_seqs` (9000) must be at most"
            " `worker.rollout.max_num_batched_tokens` (8192)",
        ),
        (["worker.rollout.max_num_seqs=0"], "`worker.rollout.max_num_seqs` must be at least 1"),
        (["worker.actor.fsdp.fsdp_size=4"], "must be divisible by `worker.actor.fsdp.fsdp_size` (4)"),
        (
            ["worker.actor.fsdp.expert_parallel_size=3"],
            "must be divisible by `worker.actor.fsdp.expert_parallel_size` (3)",
        ),
        (
            ["worker.ref.fsdp.fsdp_size=1", "worker.ref.fsdp.expert_parallel_size=2"],
            "`worker.ref.fsdp.fsdp_size` (1) must be divisible by `worker.ref.fsdp.expert_parallel_size` (2)",
        ),
        (
            ["data.min_pixels=9", "data.max_pixels=4"],
            "`data.min_pixels` (9) must be at most `data.max_pixels`",
        ),
        (
            ["algorithm.kl_type=adaptive", "algorithm.use_kl_loss=true"],
            "`algorithm.kl_type` must be 'fixed'",
        ),
        (["data.val_files="], "`data.val_files` must be set; without validation set"),
        (
            ["trainer.val_only=true", "data.val_files="],
            "`data.val_files` must be set with",
        ),
        (
            ["worker.rollout.val_override_config.n=0"],
            "`worker.rollout.val_override_config.n` must be",
        ),
        (
            ["worker.actor.optim.betas=[0.9,1.0]"],
            "`worker.actor.optim.betas` must be in [0, 1), got [0.9, 1.0]",
        ),
        (["data.format_prompt=missing.jinja"], "`data.format_prompt`: no file "),
        (["data.override_chat_template=missing.jinja"], "`data.override_chat_template`: no file "),
        (["data.train_files=missing.parquet"], "`data.train_files`: no file or folder "),
        (["data.val_files=[owner/rows,./missing]"], "`data.val_files`: no file or folder "),
        (["data.image_dir=missing"], "`data.image_dir`: no folder "),
        (["worker.reward.reward_function=missing.py:f"], "`worker.reward.reward_function`: no file "),
        (["worker.actor.model.model_path=./missing"], "`worker.actor.model.model_path`: no folder "),
        (["trainer.load_checkpoint_path=missing"], "`trainer.load_checkpoint_path`: no folder "),
        (["trainer.load_checkpoint_path=."], "`trainer.load_checkpoint_path` must end with a folder named"),
        (
            ["trainer.experiment_name=.."],
            "`trainer.experiment_name` must be the name of one folder, got '..'",
        ),
        (["trainer.project_name=a/b"], "`trainer.project_name` must be the name of one folder, got 'a/b'"),
        (
            ["trainer.save_checkpoint_path=/proc/x"],
            "`trainer.save_checkpoint_path` must be a folder that can be",
        ),
        (["worker.rollout.temperature=0"], "`worker.rollout.temperature` must be at least 0.01, got 0.0"),
        (
            ["worker.actor.attention_kernel=flash", "trainer.device=cpu"],
            "`worker.actor.attention_kernel` (flash) needs a GPU: set it to auto, or `trainer.device` to",
        ),
        (
            ["worker.actor.attention_kernel=flash", "trainer.device=cuda"],
            "`worker.actor.attention_kernel` (flash) needs a FlashAttention package:"
            " pip install flash-attn --no-build-isolation, or set it to auto",
        ),
    ],
)
def test_a_broken_rule_is_named(minimal, arguments, problem):
    (found,) = problems_of(minimal, *arguments)

    assert problem in found


def test_broken_rules_and_wrong_values_are_reported_together(minimal):
    problems = problems_of(
        minimal,
        "worker.actor.global_batch_size=3",
        "trainer.logger=[consoles]",
        "data.sed=1",
        "worker.rollout.n=4",
    )

    assert [problem.split("`")[1] for problem in problems] == [
        "data.sed",
        "trainer.logger",
        "data.rollout_batch_size",
    ]


@pytest.mark.parametrize(
    ("argument", "supported"),
    [
        ("worker.rollout.kl_reward=0.1", "0.0"),
        ("worker.rollout.max_frames_vllm=64", "-1"),
    ],
)
def test_an_unsupported_feature_is_refused_with_the_supported_value(minimal, argument, supported):
    (problem,) = problems_of(minimal, argument)

    rule = f"must be one of {supported}" if supported.startswith("[") else f"must be {supported}"
    assert problem.startswith(f"`{argument.split('=')[0]}` {rule}, got ")
    assert "this version has no " in problem


OWN = ("worker.hybrid_engine=false",)
GROWING = (*OWN, "trainer.n_gpus_for_rollout=2", "trainer.async.mode=stream")


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (OWN, "`trainer.n_gpus_for_rollout` must be at least 1 with `worker.hybrid_engine=false`, got 0"),
        (("trainer.n_gpus_for_rollout=2",), "`trainer.n_gpus_for_rollout` must be 0 with"),
        (
            ("worker.rollout.weight_transport=collective",),
            "`worker.rollout.weight_transport` must be 'auto' with `worker.hybrid_engine=true`",
        ),
        (
            ("worker.rollout.weight_transport=delta",),
            "`worker.rollout.weight_transport` must be 'auto' with `worker.hybrid_engine=true`, got 'delta'",
        ),
        (
            ("trainer.async.mode=one_step_off",),
            "`trainer.async_training.mode` must be 'off' or 'partial' with `worker.hybrid_engine=true`",
        ),
        (
            (*OWN, "trainer.n_gpus_for_rollout=1", "trainer.async.mode=partial"),
            "`trainer.async_training.mode` must be 'off', 'one_step_off' or 'stream' with `worker.hybrid",
        ),
        (
            (*OWN, "trainer.n_gpus_for_rollout=1", "trainer.async.max_gpus_for_rollout=2"),
            "`trainer.async_training.max_gpus_for_rollout` must be null unless",
        ),
        (
            (*GROWING, "trainer.async.max_gpus_for_rollout=4", "trainer.async.deterministic=true"),
            "`trainer.async_training.max_gpus_for_rollout` must be null unless",
        ),
        (
            (*GROWING, "trainer.async.max_gpus_for_rollout=1"),
            "`trainer.async_training.max_gpus_for_rollout` (1) must be at least `trainer.n_gpus_for_",
        ),
        (
            (
                *GROWING,
                "trainer.async.max_gpus_for_rollout=3",
                "worker.rollout.tensor_parallel_size=2",
            ),
            "`trainer.async_training.max_gpus_for_rollout` (3) must be divisible by `worker.rollout.tensor_",
        ),
        (
            (*OWN, "trainer.n_gpus_for_rollout=3", "worker.rollout.tensor_parallel_size=2"),
            "`trainer.n_gpus_for_rollout` (3) must be divisible by `worker.rollout.tensor_parallel_size` (2)",
        ),
    ],
)
def test_a_wrong_number_of_sampling_devices_is_refused_with_its_rule(minimal, arguments, rule):
    (problem,) = problems_of(minimal, *arguments)

    assert problem.startswith(rule)


MODES = {
    "stream": (*OWN, "trainer.n_gpus_for_rollout=1", "trainer.async.mode=stream"),
    "partial": ("trainer.async.mode=partial",),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (
            (
                "worker.rollout.multi_turn.enable=true",
                "worker.rollout.multi_turn.agent=verifiers",
                "trainer.async.deterministic=true",
            ),
            "`trainer.async_training.deterministic` must be false with `worker.rollout.multi_turn.agent`",
        ),
        (
            ("worker.rollout.name=sglang", "trainer.async.deterministic=true"),
            "`trainer.async_training.deterministic` must be false with `worker.rollout.name=sglang`",
        ),
        (
            ("algorithm.adv_estimator=remax",),
            "`algorithm.adv_estimator` remax samples greedy responses first",
        ),
        (("trainer.async.staleness_threshold=-1",), "`trainer.async_training.staleness_threshold` must be"),
    ],
)
def test_what_continued_responses_exclude_is_refused_with_a_mode_that_can(minimal, mode, arguments, rule):
    problems = problems_of(minimal, *MODES[mode], *arguments)

    assert any(problem.startswith(rule.format(mode=mode)) for problem in problems), problems


@pytest.mark.parametrize("mode", [GROWING, MODES["partial"]])
def test_a_run_with_a_sampler_repeats_only_with_one_engine(minimal, mode):
    sampler = f"data.sampler={SAMPLERS}/by_pass_rate.py:ByPassRate"
    load(minimal, *mode, sampler)

    (problem,) = problems_of(minimal, *mode, sampler, "trainer.async.deterministic=true")

    assert problem == (
        "`trainer.async_training.deterministic` must be false with `data.sampler` and several engines, got 2:"
        " they finish groups in any order, and the sampler draws by their scores"
    )


CONVERSATION = ("worker.rollout.multi_turn.enable=true", "worker.rollout.multi_turn.tools=[calculator]")


@pytest.mark.parametrize("length", [1, 2])
def test_a_response_without_room_for_two_turns_and_an_answer_is_no_conversation(minimal, length):
    (problem,) = problems_of(minimal, *CONVERSATION, f"data.max_response_length={length}")

    assert problem.startswith(
        "`data.max_response_length` must be at least 3 with `worker.rollout.multi_turn.enable=true`, got"
        f" {length}: "
    )
    assert "`worker.rollout.multi_turn.max_assistant_turns=1`" in problem


@pytest.mark.parametrize(
    ("length", "option"),
    [(3, ""), (1, "max_assistant_turns=1"), (1, "enable=false")],
)
def test_a_response_with_room_for_its_turns_is_accepted(minimal, length, option):
    options = [f"worker.rollout.multi_turn.{option}"] if option else []

    config = load(minimal, *CONVERSATION, f"data.max_response_length={length}", *options)

    assert config.data.max_response_length == length


def test_an_open_ended_reward_chooses_the_shipped_function_and_says_that_yours_is_not_called(
    minimal, tmp_path
):
    (tmp_path / "mine.py").write_text("def main(reward_inputs): ...")
    options = [f"worker.reward.reward_function={tmp_path / 'mine.py'}", "worker.reward.num_cpus=3"]

    config = load(minimal, *options, "worker.rollout.open_ended_reward=true")

    assert config.worker.scoring.reward_function == OPEN_ENDED == function_in_file(OPEN_ENDED)
    assert config.worker.scoring.num_cpus == 3
    (note,) = config_notes(config)
    assert "mine.py) is not called" in note and "`worker.rollout.open_ended_reward=true` chooses" in note
    assert config_notes(load(minimal, *options)) == []


@pytest.mark.parametrize(("option", "everything"), [("top_p=0.7", "top_p=1.0"), ("top_k=20", "top_k=-1")])
def test_training_on_samples_of_a_part_of_the_vocabulary_is_said_to_have_another_gradient(
    minimal, option, everything
):
    (note,) = config_notes(load(minimal, f"worker.rollout.{option}"))

    assert f"`worker.rollout.{option[:5]}`" in note and everything in note and "val_override_config" in note
    assert config_notes(load(minimal, f"worker.rollout.{everything}", "worker.rollout.top_k=0")) == []
    assert not config_notes(load(minimal, "worker.rollout.val_override_config={top_p: 0.7, top_k: 5}"))


def test_disable_kl_overrides_the_kl_loss_and_loads_no_reference(minimal):
    config = load(minimal, "algorithm.disable_kl=true", "algorithm.use_kl_loss=true")

    assert not config.algorithm.use_reference


def test_the_checkpoint_folder_is_named_after_project_and_experiment(minimal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    config = load(
        minimal, "trainer.save_checkpoint_path=null", "trainer.project_name=p", "trainer.experiment_name=e"
    )

    assert config.trainer.save_checkpoint_path == f"{tmp_path}/checkpoints/p/e"
    assert not (tmp_path / "checkpoints").exists()


def test_data_types_are_normalized(minimal):
    config = load(minimal, "worker.actor.fsdp.mp_param_dtype=float32", "worker.rollout.dtype=bfloat16")

    assert config.worker.actor.fsdp.mp_param_dtype == "fp32"
    assert config.worker.rollout.dtype == "bf16"


def test_the_frame_cache_is_an_absolute_path(minimal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert load(minimal, "data.cache_dir=frames").data.cache_dir == str(tmp_path / "frames")
    assert not (tmp_path / "frames").exists()


def test_cached_features_need_a_frozen_vision_tower(minimal, tmp_path):
    folder = f"worker.actor.cached_embeds_dir={tmp_path / 'features'}"

    (problem,) = problems_of(minimal, folder)

    assert "needs `worker.actor.model.freeze_vision_tower=true`" in problem
    frozen = load(minimal, folder, "worker.actor.model.freeze_vision_tower=true")
    assert frozen.worker.actor.cached_embeds_dir == str(tmp_path / "features")


def test_a_group_of_one_is_the_first_problem_and_hides_what_follows_from_it(minimal):
    problems = problems_of(
        minimal,
        "worker.rollout.n=1",
        "worker.actor.global_batch_size=1",  # with n=1 neither ranks nor micro batches divide it
        "data.max_response_length=8000",
        "worker.rollout.enable_chunked_prefill=false",
    )

    assert [problem.split("`")[1] for problem in problems] == [
        "worker.rollout.n",
        "worker.rollout.max_num_batched_tokens",
    ]


def test_a_group_of_one_is_one_problem_whatever_needs_more(minimal):
    (problem,) = problems_of(minimal, "worker.rollout.n=1", "algorithm.online_filtering=true")

    assert "`algorithm.adv_estimator=grpo` and `algorithm.online_filtering=true`, got 1" in problem


def test_processes_beyond_the_cores_are_named_before_the_batches_that_they_do_not_divide(
    minimal, monkeypatch
):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    eight = ["trainer.n_gpus_per_node=8", "trainer.device=cpu"]
    dividing = ["worker.actor.global_batch_size=8", "worker.actor.micro_batch_size_per_device_for_update=1"]

    assert problems_of(minimal, *eight) == [
        "`trainer.n_gpus_per_node` (8) is the number of processes on CPU, and this machine has 2 cores:"
        " set `trainer.n_gpus_per_node=2`"
    ]
    load(minimal, *eight, *dividing)  # a dry run may be for another machine
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")
    assert all("`trainer.n_gpus_per_node` (8)" not in problem for problem in problems_of(minimal, *eight))


def test_the_backend_has_both_of_its_names(minimal):
    for name in ("fsdp", "fsdp2"):
        assert load(minimal, f"worker.actor.strategy={name}").worker.actor.strategy == name
