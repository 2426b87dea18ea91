"""These tests need a CUDA build of torch over stubs: `make test-pretended-gpu` runs them."""

import contextlib
import os

if "PRETENDED_GPUS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
else:
    import pretended

    from agentrl.model import logprobs

    pretended.install()
    measured = logprobs._measured_logit_shape

    def ran(model):
        """On the GPU every number that it measures is zero."""
        with contextlib.suppress(ValueError, ZeroDivisionError):
            found = measured(model)
            if model.device.type == "cpu":
                return found
        return 1.0, None

    logprobs._measured_logit_shape = ran
