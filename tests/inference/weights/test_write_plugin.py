"""The plugin is found the way vLLM looks for it, and refuses paths outside of its directory."""

import importlib
import os
import subprocess
import sys
import types

import pytest

from agentrl.inference.weights.plugin import MODULE, write_plugin

FIND = """
from importlib.metadata import entry_points
for point in entry_points(group="vllm.general_plugins"):
    print(point.name, point.value, point.dist.name)
"""


def test_a_python_that_starts_with_the_directory_finds_the_entry_point(tmp_path):
    assert write_plugin(tmp_path / "plugin") == tmp_path / "plugin"
    write_plugin(tmp_path / "plugin")
    found = subprocess.run(
        [sys.executable, "-c", FIND],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "plugin")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert f"agentrl {MODULE}:register agentrl-vllm-plugin" in found


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Imports a module of the written package, with empty classes in the place of vLLM's."""
    registered = []

    class Factory:
        @staticmethod
        def register_engine(name, module, class_name):
            if any(entry[0] == name for entry in registered):
                raise ValueError(f"Weight transfer engine '{name}' is already registered.")
            registered.append((name, module, class_name))

    class Generic:
        def __class_getitem__(cls, item):
            return cls

    stand_ins = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": None},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {"WeightTransferEngineFactory": Factory},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": Generic,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
    }
    for name, attributes in stand_ins.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(write_plugin(tmp_path / "plugin")))
    forget_plugin()
    yield lambda name="": importlib.import_module(MODULE + name), registered
    forget_plugin()


def forget_plugin():
    for name in [name for name in sys.modules if name.partition(".")[0] == MODULE]:
        del sys.modules[name]


def test_registering_twice_is_harmless(plugin):
    load, registered = plugin
    load().register()
    load().register()
    assert registered == [("agentrl", f"{MODULE}.files", "FileWeightTransferEngine")]
    assert hasattr(load(".files"), registered[0][2])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("looks_for_itself", [True, False])
def test_only_a_process_that_looks_for_missed_calls_sleeps(
    plugin, monkeypatch, device, looks_for_itself
):
    module = plugin[0](".idle")

    class SpinCondition:
        def __init__(self, busy_loop_s=1.0):
            self.busy_loop_s = busy_loop_s

    broadcast = types.ModuleType("vllm.distributed.device_communicators.shm_broadcast")
    broadcast.SpinCondition = SpinCondition
    if looks_for_itself:
        broadcast.SHM_READER_RECHECK_INTERVAL_MS = 5000
    communicators = types.ModuleType("vllm.distributed.device_communicators")
    communicators.shm_broadcast = broadcast
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: device == "cpu")
    for each in (communicators, platforms):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    module.sleep_when_idle()
    module.sleep_when_idle()
    if device == "cpu" and looks_for_itself:
        assert SpinCondition().busy_loop_s == module.SPIN_S
        assert broadcast.SHM_READER_RECHECK_INTERVAL_MS == module.RECHECK_MS
    else:
        assert SpinCondition().busy_loop_s == 1.0
        assert getattr(broadcast, "SHM_READER_RECHECK_INTERVAL_MS", 5000) == 5000


def test_only_files_in_the_directory_are_read(plugin, tmp_path):
    module = plugin[0](".files")
    directory = tmp_path / "weights"
    directory.mkdir()
    inside = directory / "policy-1.safetensors"
    outside = tmp_path / "secret.safetensors"
    sibling = tmp_path / "weights-of-another-run.safetensors"
    for path in (inside, outside, sibling):
        path.write_bytes(b"x")
    (directory / "link").symlink_to(outside)
    (directory / "linked_directory").symlink_to(tmp_path)
    (directory / "kept").symlink_to(inside)

    assert module.file_inside(directory, str(inside)) == inside
    assert module.file_inside(directory, str(directory / "kept")) == inside
    for path in (
        outside,
        sibling,
        directory / ".." / "secret.safetensors",
        directory / "link",
        directory / "linked_directory" / "secret.safetensors",
        "policy-1.safetensors",
        "",
    ):
        with pytest.raises(ValueError, match="is not in the weight directory"):
            module.file_inside(directory, str(path))
    for path in (directory, directory / "absent.safetensors"):
        with pytest.raises(ValueError, match="is not a file"):
            module.file_inside(directory, str(path))
