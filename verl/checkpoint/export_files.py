# SPDX-License-Identifier: Apache-2.0
"""Files of an export: weights of a bounded size, what it takes over from the base model, and a model card.

Training does not load all tensors and files of some models, such as a head that drafts further tokens. A
merged model keeps them as they are, so that it has all parts of the model that it replaces.
"""

import json
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import metadata_load, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jinja2 import StrictUndefined, Template
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl.checkpoint.manifest import BASE_MODEL, MANIFEST, ORIGIN, STATE_FILE, STEP_FOLDER
from verl.config.files.fp8_files import block_of
from verl.config.files.model_files import PIPELINE, read_json
from verl.config.parsing import yaml_text
from verl.config.ppo import PPOConfig
from verl.config.schema import list_options
from verl.config.sft import SFTConfig
from verl.logger.file import METRICS_FILE, read_log
from verl.models.fp8_weights import with_scales
from verl.utils.rank_logger import get_logger
from verl.utils.typed_command import version_text
from verl.utils.weight_files import save_weights

MAX_FILE_BYTES = 5 * 1024**3  # as hub checkpoints are cut
CARD, TEMPLATE = "README.md", Path(__file__).with_name("card.md.jinja")
OURS = "<!-- Written by verl-merge, which replaces it; without this line it stays as it is. -->"

logger = get_logger(__name__)


def cast(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Convert tensors of floating-point numbers; None keeps them."""
    for name, tensor in tensors:
        yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


@contextmanager
def writing(folders: Sequence[Path]) -> Iterator[None]:
    """Remove earlier weights from these folders, and partial files if the block fails."""
    try:
        for pattern in ("*.safetensors", "*.safetensors.index.json", "*.part"):
            for old in [file for folder in folders for file in folder.glob(pattern)]:
                old.unlink()
        yield
    except (OSError, SafetensorError) as error:
        for part in [file for folder in folders for file in folder.glob("*.part") if file.is_file()]:
            part.unlink()
        raise OSError(
            f"{folders[0]} cannot be written ({error}): it must be a folder of yours, with room for the"
            " weights"
        ) from error


def write_files(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_file_bytes: int, stem: str = "model"
) -> torch.dtype | None:
    """Write the weights into a folder; return the dtype of the first floating-point tensor.

    `stem` begins the names of the files.
    """
    folder.mkdir(exist_ok=True)
    files: list[list[str]] = []  # tensors of each file
    total, dtype = 0, None
    for batch in _batches(tensors, max_file_bytes):
        save_weights(batch, folder / f"{len(files)}.part")
        files.append(list(batch))
        total += sum(tensor.nbytes for tensor in batch.values())
        dtype = dtype or next((t.dtype for t in batch.values() if t.is_floating_point()), None)
        batch.clear()  # before the next one is read
    _name_parts(folder, stem, files, total)
    return dtype


def _batches(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    batch, size = {}, 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > max_bytes:
            yield batch
            batch, size = {}, 0
        # safetensors rejects views, and a view would keep its large base tensor alive.
        is_view = not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes
        batch[name] = tensor.clone(memory_format=torch.contiguous_format) if is_view else tensor
        size += tensor.nbytes
    yield batch


def _name_parts(folder: Path, stem: str, files: list[list[str]], total: int) -> None:
    count = len(files)  # part of the final names
    if count == 1:
        (folder / "0.part").rename(folder / f"{stem}.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(files):
        file = f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"
        (folder / f"{index}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(content, indent=2))


def unread_tensors(
    local_dir: Path,  # a role's folder, whose manifest names the model that training started from
    starts: tuple[str, ...],  # of the tensors' names
    base_model: str | None = None,  # folder or hub name, if that model has moved since
) -> Iterator[tuple[str, Tensor]]:
    """Yield the base model's tensors of these names; warn if its files are not there."""
    if not starts:
        return
    base, folder = base_of(local_dir, base_model, "*.safetensors")
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    if folder is None or not files:
        logger.warning(
            "tensors that training does not load (%s) are not exported, because the base model %s %s: give it"
            " as `--base_model` to keep them",
            ", ".join(f"{start}*" for start in starts),
            base or "",
            "is not on this machine" if folder is None else "has no safetensors files",
        )
        return
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        slices = {
            name: file.get_slice(name)
            for file in opened
            for name in file.keys()  # noqa: SIM118 - not a dictionary
            if name.startswith(starts)
        }
        for name, tensor in with_scales(slices, block_of(read_json(folder / "config.json") or {})).items():
            yield name, tensor[...]


def copy_unread_files(
    local_dir: Path, names: tuple[str, ...], target: Path, base_model: str | None = None
) -> None:
    """Copy the base model's files of these names to a merged model; arguments as for `unread_tensors`."""
    folder = base_of(local_dir, base_model, *names)[1] if names else None
    for name in names:
        if folder is not None and (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def base_of(local_dir: Path, base: str | None, *patterns: str) -> tuple[str | None, Path | None]:
    """Return the model that training started from, if known, and its folder, if it is on this machine."""
    manifest = local_dir / MANIFEST  # checkpoints of other trainers have none
    if not base:
        base = json.loads(manifest.read_text()).get(BASE_MODEL) if manifest.is_file() else None
    return base, None if base is None else folder_of(base, *patterns)


def folder_of(base: str, *patterns: str) -> Path | None:
    """Return the folder of a model, or of a hub model in the cache; None if it is not on this machine."""
    if Path(base).is_dir():
        return Path(base)
    try:
        return Path(snapshot_download(base, local_files_only=True, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None


def write_card(local_dir: Path, folder: Path, base_model: str | None = None) -> None:
    """Write the card of a merged model from what its run recorded; one that the user wrote stays.

    Arguments are as for `unread_tensors`; `folder` has the merged model.
    """
    card = folder / CARD
    if card.is_file() and OURS not in card.read_text(encoding="utf-8", errors="replace"):
        return
    base, source = base_of(local_dir, base_model, CARD)
    facts = _recorded(local_dir.resolve()) | {
        "base": _shown(str(source.absolute()) if source and source == Path(base or "") else base),
        "base_card": {},
        "library": "diffusers" if (folder / PIPELINE).is_file() else "transformers",
        "versions": version_text(),
        "ours": OURS,
    }
    with suppress(OSError, ValueError, yaml.YAMLError):  # the base has no card, or none that can be read
        facts["base_card"] = (metadata_load(source / CARD) if source else None) or {}
    template = Template(TEMPLATE.read_text(encoding="utf-8"), undefined=StrictUndefined, trim_blocks=True)
    card.write_text(template.render(facts) + "\n", encoding="utf-8")


def _recorded(role_folder: Path) -> dict[str, Any]:
    """Return what a run recorded up to a checkpoint: other trainers and older runs record less."""
    step, run = STEP_FOLDER.fullmatch(role_folder.parent.name), role_folder.parent.parent
    last = int(step[1]) if step else 0
    state = read_json(role_folder.parent / STATE_FILE) or {}
    options = _shown((state.get(ORIGIN) or {}).get("options", {}))
    arguments = [
        shlex.quote(f"{entry.key}={yaml_text(value)}")
        for entry in list_options(PPOConfig if "algorithm.adv_estimator" in options else SFTConfig)
        if not isinstance(value := options.get(entry.key, entry.default), dict)  # which may hold secrets
        and yaml_text(value) != yaml_text(entry.default)
    ]
    log = read_log(run) if last and (run / METRICS_FILE).is_file() else []
    return {"role": role_folder.name, "step": last, "options": options, "arguments": arguments, "log": log}


def _shown(value: Any) -> Any:
    """Return the value of an option, or all options; of paths on this machine, only the last part."""
    if isinstance(value, dict):
        return {name: _shown(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value
