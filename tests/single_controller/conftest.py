# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.helpers.warm_runs import CPUS
from tests.single_controller.workers import EchoWorker
from verl.single_controller.ray.cluster import connect
from verl.single_controller.ray.resource_pool import ResourcePool
from verl.single_controller.ray.worker_group import RayWorkerGroup


@pytest.fixture(scope="package")
def ray_session():
    """One Ray cluster for these tests, with more CPUs than cores so that groups can run together."""
    connect(num_cpus=CPUS)


@pytest.fixture(scope="module")
def group(ray_session):
    """Two workers shared by the tests of a module, which must not end them."""
    with RayWorkerGroup(ResourcePool(1, 2, "cpu"), EchoWorker, "hello", env={"COLOUR": "blue"}) as group:
        yield group


@pytest.fixture
def make_group(ray_session):
    """Build groups that a test may break; they end with the test."""
    groups = []

    def make(worker_class, *args, processes=2, **kwargs):
        groups.append(RayWorkerGroup(ResourcePool(1, processes, "cpu"), worker_class, *args, **kwargs))
        return groups[-1]

    yield make
    for group in groups:
        group.kill()
