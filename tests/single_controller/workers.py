# SPDX-License-Identifier: Apache-2.0
"""Workers for the tests of the worker group: small, but real processes with real gloo groups."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.protocol import DataProto
from verl.single_controller.dispatch import Dispatch, register
from verl.single_controller.worker import Worker


def import_shelve() -> None:
    import shelve  # noqa: F401 - which nothing else imports


def fail() -> None:
    raise ImportError("nothing to import")


class ClosingWorker(Worker):
    """Leaves a file when it is closed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @register(Dispatch.ALL, phase="nothing")
    def nothing(self) -> None:
        pass

    def close(self) -> None:
        (self.folder / str(self.rank)).touch()


class EchoWorker(Worker):
    """Returns its arguments; model-parallel groups of `model_parallel` ranks."""

    def __init__(self, word: str = "", model_parallel: int = 1) -> None:
        super().__init__()
        self.word = word
        self.set_axis("train", self.rank, self.world_size, is_first=True)
        self.set_axis(
            "rollout",
            self.rank // model_parallel,
            self.world_size // model_parallel,
            is_first=self.rank % model_parallel == 0,
        )

    @register(Dispatch.ALL, phase="nothing")
    def nothing(self) -> None:
        pass

    @register(Dispatch.ALL, phase="say")
    def say(self, what: Any = None) -> Any:
        return self.rank, self.word, what

    @register(Dispatch.ALL, phase="environment")
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @register(Dispatch.ALL, phase="imported")
    def has_imported(self, module: str) -> bool:
        return module in sys.modules

    @register(Dispatch.ALL, phase="threads")
    def runs_on_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    @register(Dispatch.SHARD, phase="add_rank")
    def add_rank(self, batch: DataProto, amount: int = 1) -> DataProto:
        return DataProto.from_dict({"sums": batch.batch["numbers"] + amount * self.rank})

    @register(Dispatch.SHARD, phase="add_rank", axis="rollout")
    def add_rank_by_group(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"sums": batch.batch["numbers"] + self.rank})

    @register(Dispatch.SHARD, phase="echo")
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.SHARD, phase="echo", unread=("uid",))
    def echo_numbers(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.SHARD, phase="length")
    def length(self, batch: DataProto) -> int:
        return len(batch)

    @register(Dispatch.SHARD, phase="in place")
    def change_input(self, batch: DataProto) -> DataProto:
        batch.batch["numbers"].add_(1)
        return batch

    @register(Dispatch.SHARD, phase="generate", streaming=True, axis="rollout")
    def generate(self, batch: DataProto, gate: str | None = None) -> Iterator[tuple[int, Any]]:
        """Yield the items; after each one a file must be there, if one is given."""
        for uid in batch.non_tensor_batch["uid"]:
            yield self.rank, uid
            while gate is not None and not Path(gate).exists():
                time.sleep(0.01)

    @register(Dispatch.ALL, phase="stream", streaming=True)
    def numbers(self, count: int) -> Iterator[int]:
        yield from range(count)

    @register(Dispatch.SHARD, phase="nowhere", axis="nowhere")
    def on_unknown_axis(self, batch: DataProto) -> None:
        pass


class GlooWorker(Worker):
    """Ranks in a gloo group that fail in all the ways that workers can fail."""

    def __init__(self) -> None:
        super().__init__()
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)

    @register(Dispatch.ALL, phase="sum")
    def sum_of_ranks(self) -> float:
        total = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(total)
        return total.item()

    @register(Dispatch.ALL, phase="update_actor")
    def raise_while_others_wait(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("the loss is not finite")
        dist.barrier()

    @register(Dispatch.ALL, phase="update_actor")
    def die_while_others_wait(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @register(Dispatch.ALL, phase="update_actor")
    def hang_while_others_wait(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(3600)
        dist.barrier()

    @register(Dispatch.ALL, phase="rollout", streaming=True)
    def stream_until_failure(self, rank: int, how: str) -> Iterator[int]:
        yield from (step for step in range(3))
        if self.rank == rank and how == "raise":
            raise ValueError("the engine stopped")
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @register(Dispatch.ALL, phase="sleep")
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class BrokenWorker(Worker):
    """Cannot be constructed on one rank; the others wait for it."""

    def __init__(self, rank: int, clock: str) -> None:
        super().__init__()
        if self.rank == rank:
            Path(clock).write_text(str(time.time()))
            raise FileNotFoundError("no model at /models/none")
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)


class UnpicklableError(Exception):
    """An exception that cannot be pickled: its constructor needs two arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.lock = threading.Lock()


class OddWorker(Worker):
    """Raises an unpicklable exception, exits, prints."""

    @register(Dispatch.ALL, phase="odd")
    def raise_unpicklable(self) -> None:
        raise UnpicklableError(1, 2)

    @register(Dispatch.ALL, phase="odd")
    def exit(self) -> None:
        sys.exit(3)

    @register(Dispatch.ALL, phase="print")
    def shout(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    @register(Dispatch.ALL, phase="sleep")
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(Dispatch.ALL, phase="variable")
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)
