# SPDX-License-Identifier: Apache-2.0
"""Upload the best checkpoint of a finished run to the Hugging Face hub, with a model card.

    PUSH_TO_HUB=OWNER/NAME verl-train ... trainer.logger=[file,examples/logger/push_to_hub.py:PushToHub]

A new repository is private. The token is that of `hf auth login` or of the environment variable HF_TOKEN.
"""

import os
import shlex

from verl.checkpoint.tracker import best_checkpoint
from verl.config.files.model_files import POLICY, check_upload
from verl.logger.base import Logger, Metrics
from verl.utils.rank_logger import get_logger
from verl.utils.typed_command import command_path

REPOSITORY = "PUSH_TO_HUB"  # environment variable

logger = get_logger("push_to_hub")


class PushToHub(Logger):
    """Exports and uploads after the last step: the checkpoint with the best validation, else the last one."""

    is_local = True  # the end of the run waits for it
    _last_step = -1  # that was logged

    @classmethod
    def check(cls) -> None:
        check_upload(os.environ.get(REPOSITORY, ""), REPOSITORY)

    def log(self, metrics: Metrics, step: int) -> None:
        self._last_step = step

    def close(self, failed: bool = False) -> None:
        checkpoint = best_checkpoint(self.run.directory)
        if failed or checkpoint is None or self._last_step < (self.run.total_steps or 0):
            return  # the run may be resumed
        # Imported here so that a run that cannot upload is refused before torch loads.
        from verl.checkpoint.export_files import write_card  # noqa: PLC0415
        from verl.checkpoint.merger import merge_checkpoint, upload  # noqa: PLC0415

        role_folder, repository = checkpoint / POLICY, os.environ[REPOSITORY]
        model = self.run.config["worker"]["actor"]["model"]
        logger.info("exporting for the hub: path=%s", role_folder)
        try:
            folder = merge_checkpoint(role_folder, trust_remote_code=model["trust_remote_code"])
            write_card(role_folder, folder)
            logger.info("uploaded to %s", upload(folder, repository))
        except Exception as error:  # noqa: BLE001 - the run is complete, whatever fails here
            words = [command_path("verl-merge"), "--local_dir", role_folder, "--push-to-hub", repository]
            words += ["--trust_remote_code"] * model["trust_remote_code"]
            words += ["--family", model["family"]] if model["family"] else []
            cause, command = " ".join(str(error).split()), shlex.join(map(str, words))
            logger.warning("%s. The run is complete; this repeats the upload: %s", cause, command)
