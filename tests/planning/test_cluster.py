# SPDX-License-Identifier: Apache-2.0
"""Clusters by name, and the table of known GPUs."""

import pytest

from tests.helpers.training import ROOT
from verl.distributed.known_gpus import KNOWN_GPUS, find_gpu
from verl.planning.speed.cluster import cluster_here, parse_cluster


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "name"),
    [
        ("8xH100", 1, 8, "H100"),
        ("16x8xH200", 16, 8, "H200"),
        ("4xA100-40GB", 1, 4, "A100 40GB"),
        ("4xA100-80GB", 1, 4, "A100"),
        ("8xa100_sxm", 1, 8, "A100"),
        ("2x8xh100-pcie", 2, 8, "H100 PCIe"),
        ("2xrtx-4090", 1, 2, "RTX 4090"),
        ("1xGH200", 1, 1, "GH200"),
    ],
)
def test_a_cluster_is_read_from_its_name(text, nodes, gpus, name):
    cluster = parse_cluster(text)

    assert (cluster.nodes, cluster.gpus, cluster.gpu.name) == (nodes, gpus, name)
    assert cluster.options == [
        "trainer.device=cuda",
        f"trainer.nnodes={nodes}",
        f"trainer.n_gpus_per_node={gpus}",
    ]


@pytest.mark.parametrize("text", ["", "H100", "0xH100", "8x", "x8xH100", "8", "2x8x8", "-1xH100"])
def test_another_form_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="`--on=8xH100` for a node"):
        parse_cluster(text)


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"`T4` is not a known device: .*H200, .*A100-40GB"):
        parse_cluster("8xT4")


@pytest.mark.parametrize("gpu", KNOWN_GPUS, ids=lambda gpu: gpu.name)
def test_each_gpu_has_a_source_and_is_found_by_its_name(gpu):
    assert f"#   {gpu.source}: " in (ROOT / "verl/distributed/known_gpus.csv").read_text()
    assert parse_cluster(f"8x{gpu.name.replace(' ', '-')}").gpu is gpu
    assert find_gpu(f"NVIDIA {gpu.name}") is gpu
    assert gpu.link >= gpu.pcie or gpu.name == "GH200"


def test_the_smaller_a100_is_found_by_the_drivers_name():
    assert cluster_here("NVIDIA A100-SXM4-40GB", 1, 8) == parse_cluster("8xA100-40GB")
    assert cluster_here("NVIDIA A100-SXM4-80GB", 2, 8) == parse_cluster("2x8xA100")
    assert cluster_here("NVIDIA T4", 1, 8) is None


def test_ranks_of_one_node_use_its_links_and_others_the_adapters_that_they_share():
    cluster = parse_cluster("4x8xA100")

    assert cluster.link(8) == cluster.link(2) == 0.75 * 300e9
    assert cluster.link(32) == 0.85 * 8 * 25e9
    assert cluster.link(4, stride=8) == 0.85 * 25e9  # one GPU of each node


def test_in_an_all_to_all_one_adapter_brings_what_ranks_of_other_nodes_send():
    cluster = parse_cluster("4x8xA100")

    assert cluster.exchange(1) == cluster.exchange(8) == cluster.link(8)
    assert cluster.exchange(16) == pytest.approx(0.85 * 25e9 * 15 / 8)  # 8 of 15 others are on the other node
    assert cluster.exchange(32) == pytest.approx(0.85 * 25e9 * 31 / 24)
