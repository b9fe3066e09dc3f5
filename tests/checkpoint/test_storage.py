# SPDX-License-Identifier: Apache-2.0
import io
import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from verl.checkpoint.storage import load_metadata


class Attribute:
    """Pickled as an attribute of an object, as enum members are by Python 3.11.0 to 3.11.3."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def metadata_with(storage_data):
    file = io.BytesIO()
    pickle.dump(Metadata(state_dict_metadata={}, storage_data=storage_data), file)
    file.seek(0)
    return load_metadata(file, Path("run/global_step_1/actor/.metadata"))


def test_members_of_enums_are_read_from_the_pickles_of_every_python():
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT

    assert metadata_with(Attribute(_MEM_FORMAT_ENCODING, member.name)).storage_data is member


def test_attributes_of_anything_else_are_refused():
    with pytest.raises(ValueError, match="must not hold an attribute of"):
        metadata_with(Attribute(Metadata, "__init__"))
