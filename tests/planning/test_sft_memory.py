# SPDX-License-Identifier: Apache-2.0
"""Memory of supervised fine-tuning phase by phase, with a model of 2**30 weights and by its command."""

from dataclasses import replace

import pytest

from tests.planning.planning import GPU, NODE, TOWER, read_shape
from verl.config.model import ModelConfig
from verl.config.schema import value_at
from verl.config.sft import SFTActorConfig, SFTConfig, SFTDataConfig, SFTRunConfig, SFTWorkerConfig
from verl.models.tiny import save_tiny_model
from verl.planning.machine import GIB
from verl.planning.memory_plan import Planner
from verl.planning.planned_run import planned_sft, with_options
from verl.planning.report import remedy, resolve_auto, with_largest_sizes
from verl.planning.step_plan import make_sft_plan
from verl.trainer.sft import main

UPDATE = "worker.actor.micro_batch_size_per_device_for_update"
EXPERIENCE = "worker.actor.micro_batch_size_per_device_for_experience"


def make_config(changes=None):
    actor = SFTActorConfig(
        global_batch_size=64, micro_batch_size_per_device_for_update=1,
        micro_batch_size_per_device_for_experience=1, model=ModelConfig(model_path="model"),
    )  # fmt: skip
    config = SFTConfig(
        data=SFTDataConfig(train_files="rows", val_files="rows", max_length=2048),
        worker=SFTWorkerConfig(actor=actor),
        trainer=SFTRunConfig(n_gpus_per_node=4),
    )
    return with_options(config, changes or {})


def planner(machine=GPU):
    return Planner(planned_sft, read_shape, machine)


def phases_of(config, machine=GPU):
    return {phase.name: phase for phase in planner(machine)(config).phases}


def line_of(config, phase, tower=None):
    run = planned_sft(config)
    (one,) = (one for one in run.passes if one.phase == phase)
    shape = read_shape(None, config.worker.actor.fsdp, option="", is_trained=True, tower=tower)
    return one.largest_micro_batch(run.lengths, shape)


def test_a_run_loads_validates_updates_and_saves_one_model():
    held = phases_of(make_config())

    assert list(held) == ["load", "validation", "update_actor", "save_checkpoint"]
    update = held["update_actor"].device
    assert update["weights"] == update["gradients"] == GIB  # 4 GiB on 4 ranks
    assert update["optimizer"] == 2 * GIB
    assert update["other models"] == 0


def test_a_run_without_validation_rows_has_no_validation_phase():
    assert "validation" not in phases_of(make_config({"data.val_files": ""}))


def test_no_engine_takes_memory_on_a_gpu_and_on_a_node():
    for machine in (GPU, NODE):
        for phase in phases_of(make_config(), machine).values():
            assert "engine" not in phase.device
            assert set(phase.host) <= {"process", "copy"}


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({UPDATE: 4}, 4 * 2048),
        ({UPDATE: 64}, 16 * 2048),  # 64 rows on 4 ranks: a rank has no more
        ({UPDATE: 4, "worker.actor.dynamic_batching": False}, 4 * 2048),
        ({UPDATE: 4, "worker.actor.dynamic_batching": False, "worker.actor.ring_size": 2}, 2 * 2048),
    ],
)
def test_every_token_of_a_row_may_be_trained_on(changes, tokens):
    line = line_of(make_config(changes), "update_actor")

    assert (line.tokens, line.responses, line.patches) == (tokens, tokens, 0)


def test_every_token_of_a_row_may_be_media():
    line = line_of(make_config({UPDATE: 4}), "update_actor", tower=TOWER)

    assert line.patches == 4 * 2048 * 4  # four patches for each token


def test_a_batch_is_five_tensors_of_eight_bytes_in_three_places():
    (phase, *_) = phases_of(make_config()).values()

    assert phase.node["batch"] == 3 * 5 * 8 * 64 * 2048


def test_auto_is_the_largest_divisor_of_a_ranks_rows_that_fits():
    config = make_config({UPDATE: "auto", EXPERIENCE: "auto"})
    plan = planner(replace(GPU, device_bytes=12 * GIB))

    found = with_largest_sizes(config, plan)

    for key, name in ((UPDATE, "update_actor"), (EXPERIENCE, "validation")):
        fitting = [
            size
            for size in (1, 2, 4, 8, 16)  # 64 rows on 4 ranks
            if name not in [phase.name for phase in plan(with_options(found, {key: size})).misfits()]
        ]
        assert value_at(found, key) == max(fitting)
    assert 1 < value_at(found, UPDATE) < 16


def test_auto_stays_for_a_validation_without_rows():
    found = with_largest_sizes(make_config({EXPERIENCE: "auto", "data.val_files": ""}), planner())

    assert value_at(found, EXPERIENCE) == "auto"


def test_the_remedy_for_an_update_that_does_not_fit_is_weights_in_half_precision():
    config, plan = make_config(), planner(replace(GPU, device_bytes=7 * GIB))
    (phase,) = plan(config).misfits()

    changes = remedy(config, phase, plan)

    bf16 = {"worker.actor.fsdp.torch_dtype": "bf16", "worker.actor.optim.strategy": "adamw_bf16"}
    assert (phase.name, changes) == ("update_actor", bf16)
    assert not plan(with_options(config, changes)).misfits()


def test_the_plan_of_a_step_can_be_printed_before_auto_is_resolved():
    text = make_sft_plan(make_config({UPDATE: "auto"})).text

    assert "  auto sequences each\n" in text


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


def dry_run(model, *options):
    arguments = [
        "data.train_files=rows/train", "data.val_files=rows/val", "trainer.device=cpu",
        "trainer.n_gpus_per_node=2", f"worker.actor.model.model_path={model}", f"{UPDATE}=auto",
    ]  # fmt: skip
    return main([*arguments, *options, "--dry-run"])


def test_a_dry_run_reports_trained_parameters_phases_and_the_value_of_auto(model, capsys):
    assert dry_run(model, "worker.actor.model.lora.rank=4", "--device-memory-gb=16") == 0

    memory = capsys.readouterr().out.split("\nmemory at its most\n")[1]
    assert " parameters are trained (" in memory
    assert "  validation " in memory and "  update_actor " in memory and "  gen " not in memory
    assert f"auto: {UPDATE}=32" in memory  # 64 rows on 2 ranks


def test_workers_get_numbers_and_the_given_config_stays(model):
    config = make_config({UPDATE: "auto", "worker.actor.model.model_path": str(model), "data.max_length": 64})

    found = resolve_auto(config, planned_sft, "cpu")

    assert value_at(found, UPDATE) == 16  # 64 rows on 4 ranks
    assert value_at(config, UPDATE) == "auto"


def test_a_node_that_is_too_small_is_refused_with_the_option(model, capsys):
    assert dry_run(model, f"{EXPERIENCE}=8", "--device-memory-gb=1") == 2
    assert f"`{UPDATE}` (auto): not even one sequence fits: update_actor takes" in capsys.readouterr().err


def test_a_memory_size_that_is_not_a_positive_number_is_refused(model, capsys):
    assert dry_run(model, "--device-memory-gb=0") == 2
    assert "must be a number of GiB above zero" in capsys.readouterr().err
