# SPDX-License-Identifier: Apache-2.0
"""The memory limit of a reward process."""

import resource

GIB = 1 << 30
SCARCE = 0.5  # share of its limit above which a process that failed is replaced: its memory may have leaked


class Memory:
    """What the process may allocate: its own data, without files that it maps and what it shares.

    The limit is the kernel's (`RLIMIT_DATA`), so that it holds inside of one endless statement, too; each
    process that the function starts gets the same one.
    """

    def __init__(self, limit_gb: float | None) -> None:
        self.limit_gb = limit_gb
        self._before = resource.getrlimit(resource.RLIMIT_DATA)

    def limit(self) -> None:
        """Let the limit hold."""
        if self.limit_gb is not None:
            self._set_soft(int(self.limit_gb * GIB))

    def lift_limit(self) -> None:
        """Take the limit away."""
        if self.limit_gb is not None:
            self._set_soft(self._before[0])

    def is_scarce(self, error: BaseException) -> bool:
        """Whether the process should take no more calls after this error."""
        if self.limit_gb is None:
            return isinstance(error, MemoryError)
        return isinstance(error, MemoryError) or _data_bytes() > SCARCE * self.limit_gb * GIB

    def hint(self, error: BaseException | None) -> str:
        """What to change about an error that the limit made."""
        if self.limit_gb is None or not isinstance(error, MemoryError):
            return ""
        return f"the process may allocate `worker.reward.memory_limit_gb` ({self.limit_gb:g} GiB)\n"

    def _set_soft(self, limit: int) -> None:
        hard = self._before[1]
        resource.setrlimit(
            resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
        )


def _data_bytes() -> int:
    """What this process has allocated, as `RLIMIT_DATA` counts it, and its stack."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
