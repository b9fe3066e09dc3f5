# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI-compatible server for a model of `reward_servers`, in separate processes.

A crash ends these processes only; whoever holds a `ModelServer` learns of it by `wait`.
"""

import json
import os
import runpy
import secrets
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from verl.config.reward_servers import TEACHER, RewardServerConfig
from verl.distributed.backends import hiding_variables, showing
from verl.utils.cuda_builds import repair_cuda_builds
from verl.utils.processes.child_process import ChildProcess, signal_when_parent_dies

MODULE = "vllm.entrypoints.openai.api_server"
MIDDLEWARE = f"{__name__}.KeyRequired"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# vLLM's runner and conversion for each kind of model.
RUNNERS = {
    "chat": ("generate", "auto"),
    "score": ("pooling", "auto"),  # a classifier with one class, or by the cosine of two vectors
    "classify": ("pooling", "classify"),
    "embed": ("pooling", "embed"),
    TEACHER: ("generate", "auto"),
}
# Variables of the server's processes, unless the user has set them.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1"}
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
GPU_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it would need nvcc at the first request with top-p
CPU_CACHE_BYTES = 1 << 28  # of keys and values: vLLM fills it at start
LOOK_S = 0.2
KEY_VARIABLE = "VERL_SERVER_KEY"
REFUSAL = b'{"error": {"message": "the key of the run is missing or wrong", "code": 401}}'
SHOWN = 4000  # characters of the log that an error shows


@dataclass(frozen=True)
class ServerLaunch:
    """A model server to start, as plain data."""

    name: str  # of the model for requests
    config: RewardServerConfig
    device: str  # of `BACKENDS`
    key: str = field(repr=False)  # that requests must have
    log: str  # file of the server's output; kept over restarts
    threads: int = 1  # of a process on CPU
    devices: str | None = None  # that it may see, such as "0,1"; None keeps those of the process


def server_arguments(launch: ServerLaunch, host: str, port: int) -> list[str]:
    config = launch.config
    runner, convert = RUNNERS[config.kind]
    options: dict[str, Any] = {
        "model": config.model_path, "served-model-name": launch.name, "host": host, "port": port,
        "runner": runner, "convert": convert, "dtype": DTYPES[config.dtype],
        "tensor-parallel-size": config.tensor_parallel_size, "middleware": MIDDLEWARE,
    }  # fmt: skip
    options |= {"max-model-len": config.max_model_len, "max-num-seqs": config.max_num_seqs}
    if config.teaches:
        options["max-logprobs"] = -1  # as many as a request asks for
    switches = {
        "enforce-eager": config.enforce_eager, "trust-remote-code": config.trust_remote_code,
        "disable-uvicorn-access-log": True,
    }  # fmt: skip
    if launch.device == "cpu":
        options["kv-cache-memory-bytes"] = CPU_CACHE_BYTES
        switches["enforce-eager"] = True  # compiling takes longer than it gains
        if config.tensor_parallel_size == 1:
            options["distributed-executor-backend"] = "uni"  # one process less to start
    else:
        options["gpu-memory-utilization"] = config.gpu_memory_utilization
        # custom all-reduce shares memory between processes, which sleep mode frees
        switches |= dict.fromkeys(("enable-sleep-mode", "disable-custom-all-reduce"), config.colocate)
    for name, value in config.engine_arguments.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            switches[name if value else f"no-{name}"] = True
        else:
            options[name] = value
    given = {name: value for name, value in options.items() if value is not None}
    pairs = [text for name, value in given.items() for text in (f"--{name}", _text(value))]
    return [*pairs, *(f"--{name}" for name, is_set in switches.items() if is_set)]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def server_environment(launch: ServerLaunch) -> dict[str, str]:
    """Return the variables of the server's processes, over those of this one."""
    is_cpu = launch.device == "cpu"
    defaults = ENVIRONMENT | (CPU_ENVIRONMENT if is_cpu else GPU_ENVIRONMENT)
    variables = {name: os.environ.get(name, value) for name, value in defaults.items()}
    variables[KEY_VARIABLE] = launch.key
    if is_cpu:
        variables |= hiding_variables() | {"OMP_NUM_THREADS": str(launch.threads)}
    elif launch.config.colocate:
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # offers `/sleep` and `/wake_up`; the key guards all paths
    if launch.devices is not None:
        variables |= showing(launch.device, launch.devices)
    return variables


def run_server(arguments: list[str], variables: dict[str, str], log: str, connection: Connection) -> None:
    """Run vLLM's server in this process until it ends; its output goes into the file `log`."""
    os.environ.update(variables)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # the server is a group of its own
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    # Without a guardian, which a killed controller may not leave, the engine would outlive the server.
    os.register_at_fork(after_in_child=partial(signal_when_parent_dies, signal.SIGKILL))
    repair_cuda_builds()
    sys.argv = [MODULE, *arguments]
    runpy.run_module(MODULE, run_name="__main__")


class ModelServer:
    """A model server and its processes, which end with this object's process.

    Example::

        server = ModelServer(launch)
        server.start("127.0.0.1", 8000)  # the URL that ends in /v1
        server.wait()  # "was killed by SIGKILL"
        server.close()
    """

    def __init__(self, launch: ServerLaunch) -> None:
        self.launch = launch
        self._child: ChildProcess | None = None
        self._is_started, self._has_ended = threading.Event(), threading.Event()
        self._exit = ""
        self._root = ""

    def start(self, host: str, port: int) -> str:
        """Start the server, wait until it answers, and return its URL.

        Raises:
            RuntimeError: It ended; the message has the end of its log.
            TimeoutError: It took longer than `start_timeout_s`.
        """
        self._root = f"http://{host}:{port}"
        Path(self.launch.log).parent.mkdir(parents=True, exist_ok=True)
        arguments = server_arguments(self.launch, host, port)
        # Its processes end with the thread that starts them, which therefore stays.
        threading.Thread(target=self._keep, args=(arguments,), name="model server", daemon=True).start()
        self._is_started.wait()
        self._wait_until_healthy()
        return f"{self._root}/v1"

    def wait(self) -> str:
        """Wait until the server ends and say how."""
        self._has_ended.wait()
        return f"{self._exit}; the end of {self.launch.log}:\n{self._log_tail()}"

    def sleep(self) -> None:
        """Free the GPU; the weights wait in host memory. On CPU nothing changes."""
        if self.launch.device != "cpu":
            self._post("/sleep?level=1")

    def wake(self) -> None:
        if self.launch.device != "cpu":
            self._post("/wake_up")

    def close(self) -> None:
        """End the server and all its processes. Safe to call twice."""
        if self._child is not None:
            self._child.kill()

    def _keep(self, arguments: list[str]) -> None:
        serve = partial(run_server, arguments, server_environment(self.launch), self.launch.log)
        child = self._child = ChildProcess.start(serve)
        self._is_started.set()
        while not child.has_ended():
            time.sleep(LOOK_S)
        self._exit = child.describe_end()
        self._has_ended.set()

    def _wait_until_healthy(self) -> None:
        limit_s = self.launch.config.start_timeout_s
        end = time.monotonic() + limit_s
        while True:
            with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self._request("/health", "GET", timeout_s=5.0)
                return
            if self._has_ended.wait(LOOK_S):
                raise RuntimeError(f"the server of `reward_servers.{self.launch.name}` {self.wait()}")
            if time.monotonic() > end:
                self.close()
                raise TimeoutError(
                    f"the server of `reward_servers.{self.launch.name}` did not answer within"
                    f" `start_timeout_s` ({limit_s:g} s); the end of {self.launch.log}:\n{self._log_tail()}"
                )

    def _post(self, path: str) -> None:
        self._request(path, "POST", timeout_s=self.launch.config.start_timeout_s)

    def _request(self, path: str, method: str, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {self.launch.key}"}
        request = urllib.request.Request(self._root + path, method=method, headers=headers)
        urllib.request.urlopen(request, timeout=timeout_s).close()

    def _log_tail(self) -> str:
        try:
            return Path(self.launch.log).read_text(errors="replace")[-SHOWN:]
        except OSError as error:
            return f"not readable: {error}"


class KeyRequired:
    """Middleware of a model server, an ASGI application: every request must have the run's key.

    vLLM's own check leaves out paths such as `/score` and `/sleep`. Imported by vLLM, from `--middleware`.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] not in ("http", "websocket") or secrets.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": REFUSAL})
