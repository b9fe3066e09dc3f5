# SPDX-License-Identifier: Apache-2.0
"""The contexts of conversations, each as a row of its own."""

import itertools

import torch

from tests.helpers.family_training import Row, as_batch, own_forward


def contexts_of(response):
    """Return the slices of a response's contexts; that of the first one begins at 0."""
    starts = [0, *response.trajectory.context_starts, len(response.token_ids)]
    return list(itertools.pairwise(starts))


def compare_contexts(tiny, loader, responses):
    """Return how far the engine's log-probs are from those of training, and the number of sampled tokens."""
    rows, found = [], []
    for response in responses:
        trajectory = response.trajectory
        images = list(trajectory.prompt.media.get("images", ())) + list(trajectory.media.get("images", ()))
        for number, (start, stop) in enumerate(contexts_of(response)):
            ids, own = torch.tensor(response.token_ids[start:stop]), trajectory.is_sampled[start:stop]
            prompt, positions = torch.tensor(trajectory.prompt.token_ids), trajectory.prompt.position_ids
            later = trajectory.position_ids[..., start:stop]
            if number:
                prompt, ids, own = ids[:1], ids[1:], own[1:]
                positions = later[..., :0]
            positions = torch.cat([positions, later], dim=-1)
            whole = torch.cat([prompt, ids])
            count = int((whole == tiny.config.image_token_id).diff(prepend=torch.zeros(1)).eq(1).sum())
            shown, images = images[:count], images[count:]
            media = {"images": shown} if shown else None
            expected = tiny.family.positions(tiny.config, whole, loader.measure(media))
            assert torch.equal(positions, expected)
            sampled = torch.tensor(own, dtype=torch.int64)
            rows.append(Row(len(rows), prompt, ids, positions, sampled, (None, media)))
            found.append((torch.tensor(response.log_probs[start:stop])[-len(ids) :], sampled))
        assert not images
    with torch.no_grad():
        expected, _ = own_forward(tiny, tiny.model, as_batch(rows), loader)
    differences = []
    for row, (log_probs, sampled) in enumerate(found):
        assert not log_probs[sampled == 0].any()
        differences.append(((log_probs - expected[row, : len(log_probs)]) * sampled).abs().max().item())
    return max(differences), sum(int(sampled.sum()) for _, sampled in found)
