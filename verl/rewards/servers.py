# SPDX-License-Identifier: Apache-2.0
"""Models of `reward_servers` as the reward function gets them: `servers["NAME"]`.

The run writes where its replicas are into a file, which every scoring process reads before it
sends a request: addresses change when a replica dies and another one starts.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a scoring process starts without the packages that read configs
    from verl.config.reward_servers import RewardServerConfig

SECTION = "reward_servers"


@dataclass(frozen=True)
class AddressFile:
    """A file with the addresses of a model's replicas; it implements `Addresses`."""

    path: Path | None  # None before the run starts the model
    key: str
    identity: str
    patience_s: float

    def publish(self, urls: Sequence[str], lost: str | None = None) -> None:
        """Write the addresses of the living replicas; `lost` says why there will be none."""
        assert self.path is not None, "the model is served"
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"urls": list(urls), "lost": lost}))
        os.replace(new, self.path)  # a reader sees the whole of one version

    def living(self) -> list[str]:
        if self.path is None:
            raise ConnectionError(f"`{self.identity}` is not served yet: only a run starts it")
        state = json.loads(self.path.read_text())
        if state["lost"] is not None:
            raise ConnectionError(state["lost"])
        return state["urls"]


@dataclass(frozen=True)
class ServerSpec:
    """A model and where it is, as plain data that is sent to scoring processes."""

    name: str
    config: "RewardServerConfig"
    addresses: AddressFile | None = None  # of a model that the run serves; None while it does not

    @property
    def is_ready(self) -> bool:
        """True if requests can be sent, at least soon."""
        return not self.config.is_served or self.addresses is not None


Specs = Mapping[str, ServerSpec]


def specs_of(configs: "Mapping[str, RewardServerConfig]") -> dict[str, ServerSpec]:
    """Describe the servers of the reward function, of which the run has started none."""
    from verl.config.reward_servers import without_teachers  # noqa: PLC0415 (scoring processes call none)

    return {name: ServerSpec(name, config) for name, config in without_teachers(configs).items()}


def connect(specs: Specs) -> dict[str, Any]:
    """Return the models by name: `Judge`, `Scorer`, `Classifier` or `Embedder`.

    Raises:
        ValueError: The key of an endpoint is not set.
    """
    return {name: _connected(spec) for name, spec in specs.items()}


def _connected(spec: ServerSpec) -> Any:
    # Imported here, because they need `openai`, and most reward functions ask no model.
    from verl.rewards.graders.endpoint import Classifier, Embedder, Scorer  # noqa: PLC0415
    from verl.rewards.graders.llm_judge import Judge  # noqa: PLC0415

    config = spec.config
    if config.kind == "chat":
        return Judge(**endpoint_arguments(spec), options=config.sampling)
    kind = {"score": Scorer, "classify": Classifier, "embed": Embedder}[config.kind]
    return kind(**endpoint_arguments(spec))


def endpoint_arguments(spec: ServerSpec) -> dict[str, Any]:
    config, place = spec.config, f"{SECTION}.{spec.name}"
    same = ("api_key_env", "max_concurrency", "max_retries", "timeout_s", "cache_dir")
    return {name: getattr(config, name) for name in same} | {
        "base_url": config.url or place,
        "model": spec.name if config.is_served else config.served_model or spec.name,
        "addresses": spec.addresses or AddressFile(None, "none", place, 0.0) if config.is_served else None,
    }
