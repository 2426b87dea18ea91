"""Messages of rank 0 to the other ranks survive encoding and decoding."""

import numpy as np
import pytest
from samples_for_tests import sample_of

from agentrl.train.follow import packed, unpacked


@pytest.mark.parametrize("routed", [(True, True), (True, False), (False, True), (False, False)])
def test_samples_arrive_as_they_were_told(routed):
    samples = [
        sample_of([5, 6, 7], [0, 1, 1], reward=np.float64(0.1)),
        sample_of([8, 9], [0, 1], reward=np.float32(0.5)),
    ]
    samples[0].kept_ids = [np.asarray([6, 2], np.int32), np.asarray([7], np.int32)]
    for sample, has_routes in zip(samples, routed, strict=True):
        if has_routes:
            shape = len(sample), 2, 3
            sample.routes = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    told = unpacked(packed(samples))
    for sample, its in zip(samples, told, strict=True):
        for name in sample.__slots__:
            mine, theirs = getattr(sample, name), getattr(its, name)
            if isinstance(mine, np.ndarray):
                assert theirs.dtype == mine.dtype
                assert theirs.flags.writeable
                np.testing.assert_array_equal(mine, theirs)
            else:
                assert str(mine) == str(theirs), name
