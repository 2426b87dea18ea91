"""A vLLM says what it computes on."""

import os


class current_platform:
    device_type = "cuda" if os.environ.get("FAKE_VLLM_DEVICES") else "cpu"
