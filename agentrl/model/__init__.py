"""The network and its text: loading, attention, log-probabilities, adapters, ranks."""
