"""The notebook of examples/ runs in a kernel, whose event loop runs meanwhile, and learns."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install 'agentrl-gym[dev]'")
nbclient = pytest.importorskip("nbclient", reason="pip install 'agentrl-gym[dev]'")
pytest.importorskip("ipykernel", reason="pip install 'agentrl-gym[dev]'")
pytest.importorskip("matplotlib", reason="pip install 'agentrl-gym[dev]'")

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "notebook" / "first_run.ipynb"


def test_the_notebook_is_kept_without_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs_and_its_policy_learns(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources=where)
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    # rich displays what elsewhere it prints.
    shown = (each.get("text", "") + each.get("data", {}).get("text/plain", "") for each in outputs)
    said = "\n".join(shown)
    before, after = (
        float(re.search(rf"reward {w}: ([\d.]+)", said)[1]) for w in ("before", "after")
    )
    assert after > before + 0.5
    assert "after step 6: train.learning_rate = 0.0001" in said
    assert any("image/png" in output.get("data", {}) for output in outputs), "the curve"
