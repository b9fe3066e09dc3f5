# SPDX-License-Identifier: Apache-2.0
"""Tiny diffusion models of every family, with all of their parts."""

import pytest
from diffusers import DiffusionPipeline

from examples.quickstart.tiny_pipelines import save_tiny_wan
from tests.diffusion.models import MODELS, save
from verl.diffusion.families.registry import family_of


def load(folder):
    """Return the family of a folder, and the pipeline of diffusers."""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return family_of(folder), pipeline


@pytest.fixture(scope="session")
def sd3_folder(tmp_path_factory):
    return save("sd3", tmp_path_factory.mktemp("sd3"))


@pytest.fixture(scope="session")
def sd3(sd3_folder):
    return load(sd3_folder)


@pytest.fixture(scope="session", params=MODELS)
def model_folder(request, tmp_path_factory):
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def model(model_folder):
    return load(model_folder)


@pytest.fixture(scope="session")
def wan_folder(tmp_path_factory):
    return save_tiny_wan(tmp_path_factory.mktemp("wan"))
