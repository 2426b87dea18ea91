"""Shared by all tests: helper modules in this directory, real data where it is present."""

import asyncio
import gc
import inspect
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A shell starts what it runs in the background with SIGINT ignored, and so would be every command
# that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says how busy the machine is.
settings.register_profile("agentrl", deadline=None)
settings.load_profile("agentrl")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Pauses garbage collection: collecting tests makes a million objects and keeps them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test that is an async function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real tasks: GSM8K and SQuAD rows. AGENTRL_DATA, or `../shared/data` beside the checkout."""
    path = Path(os.environ.get("AGENTRL_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no task data at {path}; set AGENTRL_DATA to a directory with gsm8k/")
    return path
