# SPDX-License-Identifier: Apache-2.0
"""Checks, before workers start, that a resumed run continues what its checkpoint began.

A checkpoint records the options of its run and digests of its training rows and models. Other rows or models
are refused, other options listed. What a checkpoint does not record, because it is older, is not compared.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from verl.checkpoint.manifest import ORIGIN, STATE_FILE
from verl.checkpoint.tracker import checkpoint_to_resume
from verl.config.model import ModelConfig
from verl.config.schema import list_options, plain, value_at
from verl.config.trainer import RunTree
from verl.data.loader import PromptLoader, SampledLoader
from verl.planning.planned_model import PlannedModel
from verl.trainer.extensions.protocol import extension_digests
from verl.trainer.run.checkpointing import LOADER_FILE
from verl.utils.rank_logger import get_logger

# Options of `trainer` that decide where and how a run is started and watched, and not what it computes.
WITHOUT_EFFECT = {
    f"trainer.{name}"
    for name in (
        "logger", "console", "project_name", "experiment_name", "save_checkpoint_path",
        "load_checkpoint_path", "find_last_checkpoint", "allow_changed_inputs", "worker_timeout_s",
        "max_restarts", "restart_wait_s", "viewer_port", "profile_steps", "ray_timeline",
    )
}  # fmt: skip
UNSTABLE = ("_commit_hash", "_name_or_path", "transformers_version")  # entries of a model's config
SAMPLED_TENSORS, SAMPLED_VALUES = 16, 16  # of a model's files: reading all would take minutes
NEW_RUN = "start a new run with `trainer.find_last_checkpoint=false` or another `trainer.experiment_name`"

logger = get_logger(__name__)


def origin_of(config: RunTree, models: Iterable[PlannedModel]) -> dict[str, Any]:
    """Describe what a run is computed from, except its rows: its options, trained models and extensions."""
    trained = {model.role: model_digests(model.model) for model in models if model.optim is not None}
    return {"options": _options(config), "models": trained, "extensions": extension_digests(config)}


def check_resume(config: RunTree, origin: Mapping[str, Any], loader: PromptLoader | None) -> Path | None:
    """Return the checkpoint that the run resumes from, if any, and log the options that changed since.

    Raises:
        ValueError: Its rows or models changed, and `trainer.allow_changed_inputs` is not set.
    """
    trainer = config.trainer
    folder = checkpoint_to_resume(trainer)
    if folder is None:
        return None
    then = json.loads((folder / STATE_FILE).read_text()).get(ORIGIN)
    if then is None:
        then = {"options": origin["options"], "models": {}}
    options = changed_options(then["options"], origin["options"], _options(type(config)()))
    if options:
        lines = (f"\n  {name}: {old} -> {new}" for name, (old, new) in options.items())
        logger.info("options changed since the checkpoint: path=%s%s", folder, "".join(lines))
    for name, digest in origin.get("extensions", {}).items():
        if then.get("extensions", {}).get(name, digest) != digest:
            logger.warning("a file of the run changed since the checkpoint %s: %s", folder, name)
    problems = list(_changed_models(then, origin))
    if loader is not None:
        where = torch.load(folder / LOADER_FILE, weights_only=True)
        if changes := loader.changes(where):
            told = ", ".join(f"{name} {old} then, {new} now" for name, (old, new) in changes.items())
            before, now = (each["options"]["data.train_files"] for each in (then, origin))
            problems.append(f"`data.train_files` was {before} and is {now}, whose rows differ: {told}")
    if problems and not trainer.allow_changed_inputs:
        raise ValueError(
            f"the inputs differ from those of the checkpoint {folder}: {'; '.join(problems)}. Restore them to"
            f" resume; or {NEW_RUN}; or resume with these with `trainer.allow_changed_inputs=true`"
        )
    for problem in problems:
        logger.warning("resuming with changed inputs: %s", problem)
    if isinstance(loader, SampledLoader):
        try:
            loader.load_state_dict(where, allow_changes=True)
        except Exception as error:  # whatever code of the user raises
            problem = f"`data.sampler` ({loader.name}) cannot load its state of {folder}: {error!r}"
            raise ValueError(f"{problem}. Restore the file to resume; or {NEW_RUN}") from error
    return folder


def changed_options(
    then: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each changed option; one that was not recorded had its default."""
    pairs = {name: (then.get(name, defaults[name]), value) for name, value in now.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in WITHOUT_EFFECT}


def model_digests(model: ModelConfig) -> dict[str, str | None]:
    """Return digests of a model's config and, if its folder has safetensors, of its weights."""
    assert model.model_path is not None, "the config was checked"
    config, _ = PreTrainedConfig.get_config_dict(model.model_path)
    stable = {name: value for name, value in config.items() if name not in UNSTABLE}
    files = sorted(Path(model.model_path).glob("*.safetensors"))
    try:
        weights = _digest(_sketch(files)) if files else None
    except SafetensorError:  # the workers name the file when they cannot load it
        weights = None
    return {"config": _digest(stable), "weights": weights}


def _options(config: RunTree) -> dict[str, Any]:
    options = {entry.key: plain(value_at(config, entry.key)) for entry in list_options(type(config))}
    return json.loads(json.dumps(options))  # as they are read from a checkpoint


def _sketch(files: Iterable[Path]) -> dict[str, Any]:
    """Describe all tensors of files, and the first values of some, however they are spread over the files."""
    files_of: dict[str, Path] = {}
    sketch: dict[str, Any] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                tensor = file.get_slice(name)
                sketch[name] = [tensor.get_dtype(), tensor.get_shape()]
                files_of[name] = path
    names = sorted(sketch)
    for name in names[:: max(1, len(names) // SAMPLED_TENSORS)]:
        with safe_open(files_of[name], framework="pt") as file:
            values = file.get_tensor(name).flatten()[:SAMPLED_VALUES]
            sketch[name].append(values.view(torch.uint8).tolist())
    return sketch


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _changed_models(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    for role, digests in now["models"].items():
        for part, digest in then["models"].get(role, {}).items():
            if None not in (digest, digests[part]) and digest != digests[part]:
                option = f"worker.{role}.model.model_path"
                paths = then["options"][option], now["options"][option]
                yield f"`{option}` was {paths[0]} and is {paths[1]}, whose {part} differs"
                break
