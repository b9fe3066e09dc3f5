# SPDX-License-Identifier: Apache-2.0
"""The columns of a batch that the worker's passes are sent."""

from verl.batch_keys import ROUTES
from verl.single_controller.dispatch import Dispatch, remote_methods
from verl.workers.training_worker import TrainingWorker


def test_routes_are_sent_to_the_passes_of_the_policy_alone():
    methods = remote_methods(TrainingWorker).values()
    passes = [each for each in methods if each.dispatch is Dispatch.SHARD]
    with_routes = {each.name for each in passes if not set(ROUTES) <= set(each.unread)}

    assert len(passes) == 10
    assert with_routes == {"compute_log_probs", "update_actor"}
