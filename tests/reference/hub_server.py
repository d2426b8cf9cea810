"""The stand-in for the Hub of the notebooks, with the ways in which the Hub may fail."""

import contextlib
import importlib.util
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import transformers.utils.hub
from huggingface_hub import close_session, constants


def _local_hub():
    path = Path(__file__).parents[2] / "docs" / "notebooks" / "local_hub.py"
    spec = importlib.util.spec_from_file_location("local_hub", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


local_hub = _local_hub()
STAGES, REVISION = local_hub.STAGES, local_hub.REVISION


class HubServer(local_hub.LocalHub):
    """A Hub that may fail. `failures` maps stages to a status, or to `"drop"` (the connection) or `"hang"`.

    Attributes:
        stages (`list[str]`): What has been asked for, in order.
    """

    def __init__(self):
        super().__init__(_Handler)
        self.stages: list[str] = []
        self.failures: dict[str, int | str] = {}


class _Handler(local_hub.Handler):
    def answer(self, stage, body, **names):
        self.server.stages.append(stage)
        if not self._failed(self.server.failures.get(stage)):
            super().answer(stage, body, **names)

    def _failed(self, how):
        if how == "hang":
            time.sleep(2)
        if how in ("drop", "hang"):
            self.close_connection = True
        elif how is not None:
            self._answer(how, {"error": "this is a test"})
        return how is not None


@contextlib.contextmanager
def running_hub(monkeypatch):
    """A server that this process takes for the Hub for as long as the block lasts; retries do not wait."""
    with HubServer() as server:
        settings = {
            "ENDPOINT": server.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        # Shared by all calls, with the address that was valid at the first.
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
        monkeypatch.setattr(huggingface_hub.utils._http, "time", SimpleNamespace(sleep=lambda seconds: None))
        monkeypatch.setenv("HF_TOKEN", "token")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            close_session()
            server.shutdown()
            thread.join()


def environment(server, folder):
    """Of a fresh process that is to take this server for the Hub, and a folder for its cache."""
    settings = {"HF_ENDPOINT": server.address, "HF_HOME": str(folder), "HF_TOKEN": "token", "HF_HUB_DISABLE_XET": "1"}
    offline = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_MODULES_CACHE"}
    kept = {name: value for name, value in os.environ.items() if name not in offline}
    return {**kept, **settings, "OMP_NUM_THREADS": "1"}
