"""A vLLM says what it computes on."""


class current_platform:
    device_type = "cpu"
