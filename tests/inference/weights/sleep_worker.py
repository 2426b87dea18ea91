"""A trainer of `test_sleep_killed.py`: sleep_worker.py URL RUN_FILE OVERRIDES...

The stand-in at URL takes the place of the server that the run would start, and is told when the
trainer computes.
"""

import sys
import urllib.request

from agentrl.config import load_config
from agentrl.train import serving
from agentrl.train.loop import train
from agentrl.train.trainer import Trainer

url, run_file, *overrides = sys.argv[1:]


def tell(route: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url + route, method="POST")).close()


class Launcher:
    urls, failure, restarts = [url], None, 0

    async def start(self) -> None:
        tell("/started")

    def hold(self) -> None:
        pass

    def release(self) -> None:
        pass

    async def stop(self, url: str) -> None:
        raise AssertionError(f"{url} does not sleep")

    async def aclose(self) -> None:
        pass


def learn(self, *arguments, **settings):
    tell("/learning")
    metrics = computes(self, *arguments, **settings)
    tell("/learned")
    return metrics


computes, Trainer.learn = Trainer.learn, learn
serving.server_settings = lambda *_, **__: None
serving.ServerLauncher = lambda *_: Launcher()
train(load_config(run_file, overrides), quiet=True)
