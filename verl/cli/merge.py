# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint in Hugging Face format, for `from_pretrained`, vLLM and the hub.

    python3 scripts/model_merger.py --local_dir checkpoints/math/first/global_step_100/actor

writes `…/actor/huggingface/*.safetensors`. A critic (`…/critic`) becomes a sequence-classification model.
Adapters are folded into their base; by themselves they stand in `…/actor/lora_adapter`, in peft's format.
Checkpoints of EasyR1 and verl (`model_world_size_W_rank_R.pt`) work too.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.checkpoint.merger import merge_checkpoint, upload
from verl.distributed.fsdp import DTYPES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, which merges and uploads if asked, and return its exit status: 0, 1 or 2."""
    parser = argparse.ArgumentParser(
        prog="model_merger", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--local_dir", required=True, type=Path, help="folder of a role: …/global_step_N/actor"
    )
    parser.add_argument(
        "--base_model", help="what adapters are folded into, if it is no longer where they say it was"
    )
    parser.add_argument("--hf_upload_path", help="hub repository to upload to, as user/name")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="of the weights; without it the checkpoint's own"
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="let the model's own Python code run"
    )
    options = parser.parse_args(arguments)
    try:
        folder = merge_checkpoint(
            options.local_dir,
            dtype=DTYPES[options.dtype] if options.dtype else None,
            base_model=options.base_model,
            trust_remote_code=options.trust_remote_code,
        )
    except (OSError, ValueError, NotImplementedError) as error:
        sys.stderr.write(f"model_merger: {error}\n")
        return 1
    sys.stdout.write(f"model written to {folder}\n")
    if options.hf_upload_path:
        sys.stdout.write(f"uploaded to {upload(folder, options.hf_upload_path)}\n")
    return 0
