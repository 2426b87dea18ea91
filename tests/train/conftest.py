import pytest

from agentrl.view.glossary import meaning
from agentrl.view.tracking import MetricsWriter


@pytest.fixture(autouse=True)
def every_metric_of_a_run_has_a_meaning(monkeypatch):
    """Checked on whatever runs a test does in this process."""
    unknown, write = set(), MetricsWriter.write

    def checked(self, step, metrics):
        unknown.update(name for name in metrics if meaning(name) is None)
        write(self, step, metrics)

    monkeypatch.setattr(MetricsWriter, "write", checked)
    yield
    assert not unknown, "agentrl/view/glossary.py says nothing of these"
