"""Messages of rank 0 to the other ranks survive encoding and decoding."""

import json

import numpy as np
import pytest
from samples_for_tests import sample_of

from agentrl.train.follow import packed, unpacked


@pytest.mark.parametrize("routed", [(True, True), (True, False), (False, True), (False, False)])
def test_samples_arrive_as_they_were_told_and_routes_as_arrays(routed):
    samples = [sample_of([5, 6, 7], [0, 1, 1]), sample_of([8, 9], [0, 1])]
    samples[0].kept_ids = [np.asarray([6, 2], np.int32), np.asarray([7], np.int32)]
    for sample, has_routes in zip(samples, routed, strict=True):
        if has_routes:
            shape = len(sample), 2, 3
            sample.routes = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    plain, arrays = packed(samples)
    assert ("routes" in arrays) == any(routed)
    told = unpacked(json.loads(json.dumps(plain)), arrays)
    for sample, its in zip(samples, told, strict=True):
        for name in ("token_ids", "rollout_logprobs", "routes"):
            mine, theirs = getattr(sample, name), getattr(its, name)
            if mine is None:
                assert theirs is None
            else:
                assert theirs.dtype == mine.dtype
                np.testing.assert_array_equal(mine, theirs)
        assert sample.trajectory_id == its.trajectory_id
        assert str(sample.kept_ids) == str(its.kept_ids)
