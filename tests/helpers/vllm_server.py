# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI-compatible server in a separate process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.distributed import free_port
from verl.utils.cuda_builds import CHILD_SITE

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextlib.contextmanager
def vllm_server(model: Path, log: Path, *arguments: str) -> Iterator[str]:
    """Serve a model; yield the address that ends in /v1 once it responds."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "1024",
        "--kv-cache-memory-bytes", str(64 << 20), "--distributed-executor-backend", "uni", *arguments,
    ]  # fmt: skip
    path = os.pathsep.join([str(CHILD_SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
        )  # fmt: skip
    try:
        _wait_until_healthy(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        _stop(server)


def _wait_until_healthy(server, url, log):
    end = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        assert server.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.2)


def _stop(server):
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):  # its engine has ended with it
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
