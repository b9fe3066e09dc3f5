# SPDX-License-Identifier: Apache-2.0
"""All metrics of a step that mean something in its run, grouped by area."""

from collections.abc import Iterator

from rich.text import Text

from verl.logger.base import Metrics

CORRECTION = "rollout_corr/"
CORRECTED = ("rollout_corr/rollout_is_", "rollout_corr/rollout_rs_")  # logged only if something is corrected
CRITIC = "critic/"
OF_A_CRITIC = ("critic/values/", "critic/vf_", "critic/grad_norm", "critic/lr")  # logged only by a critic
WITHOUT_CRITIC = ("critic/returns/",)  # equal the advantages
GPU_MEMORY = "perf/max_memory_"
LABEL_WIDTH = 19
SEPARATOR = " · "


def meaningful(metrics: Metrics) -> dict[str, float]:
    """Leave out the metrics that say nothing in the run that logged them."""
    is_corrected = any(key.startswith(CORRECTED) for key in metrics)
    has_critic = _has_critic(metrics)
    return {
        key: value
        for key, value in metrics.items()
        if (is_corrected or not key.startswith(CORRECTION))
        and (has_critic or not key.startswith(WITHOUT_CRITIC))
        and not (value == 0 and key.startswith(GPU_MEMORY))  # on CPU
    }


def area_lines(metrics: Metrics, width: int) -> Iterator[Text]:
    """Yield `actor   pg_loss 0.1 · grad_norm 2`, in the order of the metrics, broken between entries."""
    for area, entries in _by_area(meaningful(metrics)).items():
        label, line = area, entries[0]
        for entry in entries[1:]:
            if 2 + LABEL_WIDTH + 1 + len(line) + len(SEPARATOR) + len(entry) > width:
                yield Text(f"  {label:<{LABEL_WIDTH}} {line}")
                label, line = "", entry
            else:
                line += SEPARATOR + entry
        yield Text(f"  {label:<{LABEL_WIDTH}} {line}")


def _has_critic(metrics: Metrics) -> bool:
    return any(key.startswith(OF_A_CRITIC) for key in metrics)


def _by_area(metrics: Metrics) -> dict[str, list[str]]:
    areas: dict[str, list[str]] = {}
    has_critic = _has_critic(metrics)
    for key, value in metrics.items():
        area, _, name = key.rpartition("/") if key.count("/") == 1 else key.partition("/")
        if area == "critic" and not has_critic:
            area = "scores"  # EasyR1's names for scores and advantages, which need no critic
        areas.setdefault(area or "other", []).append(f"{name or key} {value:.4g}")
    return areas
