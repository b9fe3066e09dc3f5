# SPDX-License-Identifier: Apache-2.0
"""Switches that are `auto`: what is chosen on a device of some size, for a model of some type."""

import json
import logging
from dataclasses import replace

import pytest

from tests.planning.planning import GPU, NODE, read_shape
from tests.planning.test_memory_plan import make_config
from verl.config.distillation import DistillationConfig, TeacherConfig
from verl.config.model import LoraConfig, ModelConfig, OffloadConfig
from verl.config.ppo import AlgorithmConfig
from verl.config.schema import value_at
from verl.config.worker import PrimeConfig
from verl.planning import report
from verl.planning.auto_switches import SHARES, choose, open_switches, type_of, uncompiled
from verl.planning.machine import GIB, UnknownMemoryError, missing_compiler
from verl.planning.memory_plan import Planner
from verl.planning.planned_run import planned_ppo, with_options
from verl.planning.speed.cluster import parse_cluster
from verl.planning.speed.report import advise, time_text
from verl.planning.speed.step_time import Predictor
from verl.trainer.run.resuming import origin_of

RECOMPUTE, COMPILE = "worker.actor.model.enable_gradient_checkpointing", "worker.actor.model.compile_blocks"
PARAMS, STATE = "worker.actor.offload.offload_params", "worker.actor.offload.offload_optimizer"
UPDATE = "worker.actor.micro_batch_size_per_device_for_update"


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    changes = {"trainer.device": "cuda", "worker.actor.model.model_path": str(tmp_path), UPDATE: 4}
    return make_config(changes | {PARAMS: "auto", STATE: "auto"})


def planner(gib, device="cuda"):
    machine = replace(GPU, device_bytes=int(gib * GIB)) if device == "cuda" else NODE
    return Planner(planned_ppo, read_shape, machine)


def chosen(config, plan, recorded=None):
    switches = open_switches(type(config), plan.describe(config))
    return choose(with_options(config, switches), switches, plan, recorded or {})


def values(config, plan, recorded=None):
    found = chosen(config, plan, recorded)
    assert all(value_at(found.config, key) == choice.value for key, choice in found.choices.items())
    return {key: choice.value for key, choice in found.choices.items()}


def test_where_all_fits_everything_stays_on_the_device_and_is_compiled(config):
    assert values(config, planner(400)) == {PARAMS: False, STATE: False, COMPILE: True, RECOMPUTE: False}


def test_where_nothing_fits_no_switch_takes_memory(config):
    # Compiling takes no memory where no MLP runs in tiles.
    assert values(config, planner(4)) == {PARAMS: True, STATE: True, COMPILE: True, RECOMPUTE: True}


def test_the_smallest_share_of_blocks_that_fits_is_recomputed(config):
    found = {}
    for gib in range(12, 80):
        plan = planner(gib)
        resolved = chosen(config, plan).config
        if plan(resolved).misfits():
            continue
        share = found[gib] = value_at(resolved, RECOMPUTE)
        for less in SHARES[: SHARES.index(share)] if share is not True else SHARES:
            assert plan(with_options(resolved, {RECOMPUTE: less})).misfits()

    shares = [float(share) for share in found.values()]
    assert shares == sorted(shares, reverse=True)
    assert set(shares) == {1.0, 0.75, 0.5, 0.25, 0.0}


def test_what_was_given_stays(config):
    given = with_options(config, {RECOMPUTE: True, COMPILE: False, PARAMS: True})

    assert values(given, planner(400)) == {STATE: False}


def test_a_resumed_run_repeats_what_was_chosen_if_it_still_fits(config):
    recorded = {RECOMPUTE: 0.5, COMPILE: False, PARAMS: True, STATE: "auto"}
    expected = {PARAMS: True, STATE: False, COMPILE: False, RECOMPUTE: 0.5}

    assert values(config, planner(400), recorded=recorded) == expected
    assert values(config, planner(4), recorded=recorded)[RECOMPUTE] is True


def test_a_repeated_choice_is_shown_as_one(config):
    choices = chosen(config, planner(400), recorded={RECOMPUTE: True, COMPILE: "auto"}).choices

    assert str(choices[RECOMPUTE]) == "true (as in the checkpoint)"
    assert str(choices[COMPILE]) == "true"


def test_a_model_without_a_path_of_its_own_has_the_choices_of_the_policy(config):
    prime = PrimeConfig(global_batch_size=16, micro_batch_size_per_device_for_update=1)
    worker = replace(config.worker, prime=prime)
    config = replace(config, worker=worker, algorithm=AlgorithmConfig(adv_estimator="prime"))
    found = chosen(config, planner(400))

    assert not [key for key in found.choices if key.startswith("worker.prime.model")]
    assert [each.model.compile_blocks for each in planned_ppo(found.config).models] == [True] * 4


def test_a_teacher_stays_on_the_device_where_it_fits(config):
    teachers = {"large": TeacherConfig(model_path="m", offload=OffloadConfig(offload_params="auto"))}
    config = replace(config, distillation=DistillationConfig(enabled=True, teacher_models=teachers))
    key = "distillation.teacher_models.large.offload.offload_params"

    for gib, offloads in ((400, False), (4, True)):
        found = chosen(config, planner(gib))
        assert found.choices[key].value is offloads
        assert found.config.distillation.teacher_models["large"].offload.offload_params is offloads

    then = with_options(config, {key: True})  # a checkpoint has named sections as a whole
    recorded = origin_of(then, ())["options"]
    assert chosen(config, planner(400), recorded).choices[key].value is True


def test_a_mlp_in_tiles_comes_before_compiled_blocks_where_memory_needs_it(config):
    def tiled(*args, **kwargs):
        shape = read_shape(*args, **kwargs)
        return replace(shape, text=replace(shape.text, is_tiled=True))

    config = with_options(config, {UPDATE: 16, RECOMPUTE: True, PARAMS: True, STATE: True})
    found = set()
    for gib in range(8, 80, 2):
        plan = Planner(planned_ppo, tiled, planner(gib).machine)
        if not plan(with_options(config, {COMPILE: False})).misfits():
            [choice] = chosen(config, plan).choices.values()
            found.add((choice.value, choice.reason))
    assert found == {(True, ""), (False, "more would not fit")}


def test_on_cpu_blocks_are_recomputed_and_not_compiled(config):
    found = chosen(config, planner(0, "cpu")).choices

    cautious = {PARAMS: True, STATE: True, COMPILE: False, RECOMPUTE: True}
    assert {key: choice.value for key, choice in found.items()} == cautious
    assert str(found[COMPILE]) == "false (on cpu)"


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, "cuda", ""),
        ({}, "npu", "not tested on npu"),
        ({"lora": LoraConfig(rank=4)}, "cuda", ""),
        ({"lora": LoraConfig(rank=4, use_dora=True)}, "cuda", "only plain adapters"),
        ({"family": "own.py:FAMILY"}, "cuda", "blocks of unknown are not tested compiled"),
        ({"model_path": "owner/elsewhere"}, "cuda", "blocks of unknown are not tested compiled"),
    ],
)
def test_a_reason_is_named_where_blocks_are_not_compiled(config, changes, device, reason):
    assert uncompiled(replace(config.worker.actor.model, **changes), device).startswith(reason)
    assert (uncompiled(replace(config.worker.actor.model, **changes), device) == "") is (reason == "")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "qwen2_5_vl"}, "qwen2_5_vl"),  # as it was published, without sections
        ({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text"}}, "qwen2_5_vl"),
        ({"model_type": "internvl", "text_config": {"model_type": "qwen2"}}, "qwen2"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "gemma3_text"),
        ({"model_type": "own"}, "own"),
    ],
)
def test_the_type_is_that_of_the_language_model(tmp_path, fields, expected):
    (tmp_path / "config.json").write_text(json.dumps(fields))

    assert type_of(ModelConfig(model_path=str(tmp_path))) == expected


def test_without_a_c_compiler_or_for_replayed_routes_nothing_is_compiled(config, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    problem = missing_compiler()
    assert problem
    replayed = with_options(config, {"worker.actor.router_replay": "r2"})

    def read(*args, **kwargs):
        return replace(read_shape(*args, **kwargs), routes=8)

    without = Planner(planned_ppo, read, replace(GPU, no_compiler=problem))
    assert str(chosen(config, without).choices[COMPILE]) == f"false ({problem})"
    plan = Planner(planned_ppo, read, GPU)
    assert str(chosen(replayed, plan).choices[COMPILE]) == "false (routes are replayed)"


def test_the_choices_are_logged_and_hold_in_the_config_that_a_checkpoint_records(config, monkeypatch, caplog):
    monkeypatch.setattr(report, "make_planner", lambda describe, machine: planner(400))
    monkeypatch.setattr(logging.getLogger("verl.planning.report"), "propagate", True)
    with caplog.at_level(logging.INFO):
        resolved = report.resolve_auto(config, planned_ppo, "cuda", lambda device: GPU)

    assert f"chosen for the device: {COMPILE}=true" in caplog.text
    assert value_at(resolved, RECOMPUTE) is False
    assert open_switches(type(resolved), planned_ppo(resolved)) == {}


def test_without_a_figure_of_memory_switches_are_cautious_and_sizes_an_error(config, caplog, monkeypatch):
    def find(device):
        raise UnknownMemoryError("no GPU here reports its memory")

    monkeypatch.setattr(logging.getLogger("verl.planning.report"), "propagate", True)
    with caplog.at_level(logging.INFO):
        resolved = report.resolve_auto(config, planned_ppo, "npu", find)
    found = [value_at(resolved, key) for key in (PARAMS, STATE, COMPILE, RECOMPUTE)]
    assert found == [True, True, False, True]
    assert "no npu reports its memory, so nothing is chosen for it" in caplog.text
    with pytest.raises(UnknownMemoryError) as refused:
        report.resolve_auto(with_options(config, {UPDATE: "auto"}), planned_ppo, "npu", find)
    assert str(refused.value) == (  # not by a switch that only `--dry-run` has
        f"`{UPDATE}` (auto) must be a number where no npu reports its memory: set {UPDATE}=1 or more"
    )


def test_a_run_that_does_not_fit_is_told_at_its_start_what_would_help(config, monkeypatch, caplog):
    monkeypatch.setattr(report, "make_planner", lambda describe, machine: planner(12))
    monkeypatch.setattr(logging.getLogger("verl.planning.report"), "propagate", True)
    given = with_options(config, {RECOMPUTE: False, UPDATE: 16})
    with caplog.at_level(logging.WARNING):
        resolved = report.resolve_auto(given, planned_ppo, "cuda", lambda device: GPU)

    assert [phase.name for phase in planner(12)(resolved).misfits()] == ["update_actor"]
    [message] = [each.getMessage() for each in caplog.records]
    assert message.startswith("by its plan the run does not fit: update_actor takes ")
    assert ", 10.8 are usable: set " in message


def test_what_does_not_fit_is_not_made_larger_by_advice(config):
    config = with_options(config, {RECOMPUTE: True, UPDATE: 16, PARAMS: True, STATE: True, COMPILE: False})
    for gib in (8, 400):
        predict = Predictor(planner(gib), parse_cluster("4xH100"))
        names = [name for each in advise(config, predict) for name in each.changes]
        assert bool(predict.plan(config).misfits()) is (gib == 8)
        assert (RECOMPUTE in names) is (gib == 400)


def test_advice_may_be_a_smaller_size_that_leaves_blocks_as_they_ran(config):
    predict = Predictor(planner(250), parse_cluster("4xL20"))
    large = with_options(config, {UPDATE: 16, "data.max_response_length": 16384})
    found = chosen(large, predict.plan)
    sizes = [
        each.changes[UPDATE]
        for each in advise(found.config, predict, found.choices)
        if UPDATE in each.changes
    ]

    assert value_at(found.config, RECOMPUTE) is True
    assert sizes == [2]
    assert value_at(chosen(with_options(large, {UPDATE: 2}), predict.plan).config, RECOMPUTE) is not True


def test_advice_may_take_memory_from_what_was_chosen(config):
    config = with_options(config, {UPDATE: 1})
    for gib in range(12, 80):
        predict = Predictor(planner(gib), parse_cluster("4xH100"))
        found = chosen(config, predict.plan)
        strict = {tuple(each.changes) for each in advise(found.config, predict)}
        for advice in advise(found.config, predict, found.choices):
            if tuple(advice.changes) == (UPDATE,) and (UPDATE,) not in strict:
                larger = with_options(config, advice.changes)
                assert predict(chosen(larger, predict.plan).config).seconds == advice.seconds
                return
    pytest.fail("no memory in which a larger size takes the place of another choice")


def test_a_choice_is_shown_with_the_seconds_that_it_saves(config):
    predict = Predictor(planner(400), parse_cluster("4xH100"))
    found = chosen(config, predict.plan)
    whole = with_options(found.config, {RECOMPUTE: True})
    saved = predict(whole).seconds - predict(found.config).seconds

    assert saved > 0
    lines = time_text(found.config, predict, found.choices).splitlines()
    assert f"  auto: {RECOMPUTE}=false saves {saved:.1f} s" in lines
    assert len([line for line in lines if " saves " in line]) == len(found.choices)
