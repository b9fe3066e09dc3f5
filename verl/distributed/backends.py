# SPDX-License-Identifier: Apache-2.0
"""Kinds of devices that train: an entry of `BACKENDS` for each.

To add one, add an entry; no other file names a kind. Imports neither torch nor Ray, so that options and plans
can be read without them.
"""

import glob
import os
from dataclasses import dataclass

HIDDEN = ("", "-1")  # values of a variable that show a process no device
KEEPS_ALL = "RAY_EXPERIMENTAL_NOSET_"  # and a variable's name: Ray leaves that variable alone


@dataclass(frozen=True)
class DeviceBackend:
    """A kind of device."""

    name: str  # value of `trainer.device`, and torch's type of its tensors
    collective: str  # backend of torch.distributed for its tensors; gloo serves those on the CPU
    resource: str  # Ray's name for its devices
    visible: tuple[str, ...] = ()  # environment variables that list a process's devices, the usual one first
    files: tuple[str, ...] = ()  # patterns of files by which drivers show devices
    package: str | None = None  # its import teaches torch the type; None if torch knows it
    has_kernels: bool = False  # for attention and the head: CUDA's, or HIP's under the same names

    @property
    def is_gpu(self) -> bool:
        """True if its devices have memory of their own."""
        return self.resource != CPU_RESOURCE

    @property
    def groups(self) -> str:
        """Value for `init_process_group`, such as "cpu:gloo,cuda:nccl"."""
        return f"cpu:gloo,{self.name}:{self.collective}" if self.is_gpu else f"cpu:{self.collective}"


CPU_RESOURCE = "CPU"
USUAL_GPU = "cuda"  # the kind of GPUs that are known by their data sheets only
BACKENDS = {
    backend.name: backend
    for backend in (
        DeviceBackend("cpu", "gloo", CPU_RESOURCE),
        DeviceBackend(  # NVIDIA, and AMD by ROCm, which torch calls by the same name
            "cuda", "nccl", "GPU",
            visible=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
            files=("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd"),  # of CUDA, of CUDA in WSL, of ROCm
            has_kernels=True,
        ),
        DeviceBackend(  # Ascend
            "npu", "hccl", "NPU",
            visible=("ASCEND_RT_VISIBLE_DEVICES",), files=("/dev/davinci[0-9]*",), package="torch_npu",
        ),
        # Intel; a machine shows its GPUs as it shows those for displays only
        DeviceBackend("xpu", "xccl", "GPU", visible=("ZE_AFFINITY_MASK",)),
    )
}  # fmt: skip


def on_gpu(kind: str) -> bool:
    """Return whether devices of a kind have memory of their own."""
    return BACKENDS[kind].is_gpu


def gpu_backends() -> tuple[DeviceBackend, ...]:
    """Return the kinds with memory of their own, in the order in which `trainer.device=auto` prefers them."""
    return tuple(backend for backend in BACKENDS.values() if backend.is_gpu)


def shown_backend() -> DeviceBackend | None:
    """Return the first kind whose drivers show a device that is not hidden from this process."""
    for backend in gpu_backends():
        hidden = any(os.environ.get(name) in HIDDEN for name in backend.visible)
        if not hidden and any(map(glob.glob, backend.files)):
            return backend
    return None


def hiding_variables() -> dict[str, str]:
    """Return the environment of a process that may see no device."""
    return {name: HIDDEN[0] for backend in gpu_backends() for name in backend.visible}


def one_device_each() -> dict[str, str]:
    """Return the environment in which Ray shows each actor its own devices only."""
    return {f"{KEEPS_ALL}{name}": "" for backend in gpu_backends() for name in backend.visible}


def visible_devices(kind: str) -> str:
    """Return the devices of a kind that this process may see, as its environment lists them."""
    listed = (os.environ.get(name) for name in BACKENDS[kind].visible)
    return next(filter(None, listed), "")


def showing(kind: str, devices: str) -> dict[str, str]:
    """Return the environment of a process that may see these devices of a kind."""
    return dict.fromkeys(BACKENDS[kind].visible, devices)
