# SPDX-License-Identifier: Apache-2.0
"""The device type `vgpu`: a GPU without memory, kernels or values, on any build of torch.

`install` registers it with torch and adds it to `verl.distributed.backends`, so that the project takes its
GPU branches. Its tensors are fake tensors of `VirtualGPU` (`tests/virtual/mode.py`).
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend `fake`
from torch.utils import backend_registration

from tests.virtual.tally import Tally
from verl.distributed.backends import BACKENDS, DeviceBackend

TYPE = "vgpu"


class VirtualBackend(DeviceBackend):
    """A kind of its own, on which CPU tensors have collectives without values too."""

    @property
    def groups(self) -> str:
        return f"cpu:{self.collective},{self.name}:{self.collective}"


BACKEND = VirtualBackend(TYPE, collective="fake", resource="GPU", has_kernels=True)


class Stream:
    """A stream on which everything is done at once."""

    device_index, stream_id = 0, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device(TYPE, 0)

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Module(backend_registration._DummyBackendModule):
    """The device's counterpart of `torch.cuda`; its memory figures come from the tally."""

    Stream, Event = Stream, Event

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    default_stream = current_stream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.tally.device.peak

    max_memory_reserved = max_memory_allocated

    def memory_allocated(self, device: Any = None) -> int:
        return self.tally.device.live

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.tally.reset_peak()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)  # it has no values to draw

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...

    def get_device_name(self, device: Any = None) -> str:
        return "virtual"

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return 0, 0  # that of no package's kernels

    def get_device_properties(self, device: Any = None) -> Any:
        raise RuntimeError("a virtual GPU has no properties")


def install(tally: Tally) -> None:
    """Register the device; once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(TYPE, backend_module=Module(tally))
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # `torch.tensor(data, device=...)` fills host memory, then copies
    torch.autograd.set_multithreading_enabled(False)  # a device's own thread would need its streams
    BACKENDS[TYPE] = BACKEND


def start_processes(rank: int, world_size: int) -> None:
    """Start a process group of ranks that do not exist."""
    dist.init_process_group(BACKEND.groups, rank=rank, world_size=world_size, store=FakeStore())
