# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint in Hugging Face format, for `from_pretrained`, vLLM and the hub.

    verl-merge --local_dir checkpoints/math/first/global_step_100/actor

writes `…/actor/huggingface/*.safetensors` and a model card, its README.md. A critic (`…/critic`) becomes a
sequence-classification model, a diffusion model a folder for `DiffusionPipeline.from_pretrained`.
Adapters are merged into their base; `…/actor/lora_adapter` has them separately, in peft's format.
Checkpoints of EasyR1 and verl (`model_world_size_W_rank_R.pt`) work too.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from verl.checkpoint.manifest import check_role_folder
from verl.config.files.model_files import check_upload
from verl.config.files.paths import extension_in_file
from verl.config.model import DTYPES
from verl.utils.cuda_builds import repair_cuda_builds
from verl.utils.typed_command import command_parser


def main(arguments: Sequence[str] | None = None) -> int:
    repair_cuda_builds()
    parser = command_parser("verl-merge", __doc__)
    parser.add_argument(
        "--local_dir", required=True, type=Path, help="folder of a role: …/global_step_N/actor"
    )
    parser.add_argument("--base_model", help="model that training started from, if it has moved since")
    parser.add_argument("--push-to-hub", "--hf_upload_path", help="hub repository OWNER/NAME to upload to")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="type of the weights (default: as in the checkpoint)"
    )
    parser.add_argument("--family", help="model family of a file, as `worker.actor.model.family` of the run")
    parser.add_argument("--trust_remote_code", action="store_true", help="allow the model's own Python code")
    options = parser.parse_args(arguments)
    try:
        check_role_folder(options.local_dir)
        if options.push_to_hub is not None:
            check_upload(options.push_to_hub, "--push-to-hub")
        # Imported here so that `--help` and a wrong folder are answered before torch loads.
        from verl.checkpoint.export_files import write_card  # noqa: PLC0415
        from verl.checkpoint.merger import merge_checkpoint, upload  # noqa: PLC0415
        from verl.distributed.fsdp import torch_dtype  # noqa: PLC0415
        from verl.models.families.registry import register_family  # noqa: PLC0415

        register_family(extension_in_file(options.family) if options.family else None)
        folder = merge_checkpoint(
            options.local_dir,
            dtype=torch_dtype(options.dtype) if options.dtype else None,
            base_model=options.base_model,
            trust_remote_code=options.trust_remote_code,
        )
        write_card(options.local_dir, folder, options.base_model)
        sys.stdout.write(f"model written to {folder}\n")
        if options.push_to_hub is not None:
            sys.stdout.write(f"uploaded to {upload(folder, options.push_to_hub)}\n")
    except (OSError, ValueError, NotImplementedError) as error:
        sys.stderr.write(f"verl-merge: {error}\n")
        return 1
    return 0
