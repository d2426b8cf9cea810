"""A stand-in for the Hub on this machine: what pushing and loading ask of it, and the ways in which it may fail."""

import base64
import contextlib
import hashlib
import json
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import huggingface_hub
from huggingface_hub import close_session, constants


REVISION = "0123456789" * 4
LARGE = (".safetensors", ".png")
# Stages of a push, by the path that is asked for.
STAGES = {
    "create": r"/api/repos/create",
    "validate": r"/api/validate-yaml",
    "preupload": r"/api/models/.+/preupload/.*",
    "batch": r"/.+\.git/info/lfs/objects/batch",
    "upload": r"/upload/(?P<oid>\w+)",
    "commit": r"/api/models/(?P<repo>.+)/commit/.*",
}
OTHERS = {
    "download": r"/(?P<repo>.+?)/resolve/[^/]+/(?P<name>.+)",
    "list": r"/api/models/(?P<repo>.+?)/tree/.*",
    "about": r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/.*)?",
}


class HubServer(ThreadingHTTPServer):
    """Repositories in memory. `failures` maps stages to a status, or to `"drop"` (the connection) or `"hang"`.

    Attributes:
        repositories (`dict[str, dict[str, bytes]]`): Committed files by repository and name.
        settings (`dict[str, dict]`): What each repository was made with.
        stages (`list[str]`): What has been asked for, in order.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.settings: dict[str, dict] = {}
        self.blobs: dict[str, bytes] = {}
        self.stages: list[str] = []
        self.failures: dict[str, int | str] = {}

    def handle_error(self, request, client_address):
        """Clients that hang up are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        path, body = unquote(urlsplit(self.path).path), self._body()
        for stage, pattern in {**STAGES, **OTHERS}.items():
            if match := re.fullmatch(pattern, path):
                self.server.stages.append(stage)
                if not self._failed(self.server.failures.get(stage)):
                    getattr(self, f"_{stage}")(body, **match.groupdict())
                return
        self._answer(404)

    do_GET = do_HEAD = do_PUT = do_POST

    def _body(self):
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _failed(self, how):
        if how == "hang":
            time.sleep(2)
        if how in ("drop", "hang"):
            self.close_connection = True
        elif how is not None:
            self._answer(how, {"error": "this is a test"})
        return how is not None

    def _answer(self, status, content=b"", **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers["content-type"] = "application/json"
        self.send_response(status)
        for name, value in {"content-length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _create(self, body):
        settings = json.loads(body)
        repo = "/".join([settings.get("organization") or "tester", settings["name"].split("/")[-1]])
        known = repo in self.server.repositories
        self.server.repositories.setdefault(repo, {})
        self.server.settings.setdefault(repo, settings)
        self._answer(409 if known else 200, {"url": f"{self.server.address}/{repo}", "name": repo, "id": repo})

    def _validate(self, body):
        card = json.loads(body)["content"]
        errors = [] if card.startswith("---\n") else [{"message": "there is no metadata"}]
        self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def _preupload(self, body):
        names = [file["path"] for file in json.loads(body)["files"]]
        modes = ["lfs" if name.endswith(LARGE) else "regular" for name in names]
        files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in zip(names, modes)]
        self._answer(200, {"files": files})

    def _batch(self, body):
        objects = json.loads(body)["objects"]
        for wanted in objects:
            # What has arrived before needs no action.
            if wanted["oid"] not in self.server.blobs:
                wanted["actions"] = {"upload": {"href": f"{self.server.address}/upload/{wanted['oid']}"}}
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _upload(self, body, oid):
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.blobs[oid] = body
        self._answer(200)

    def _commit(self, body, repo):
        files = {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
        self.server.repositories[repo] |= files
        self._answer(200, {"success": True, "commitOid": REVISION, "hookOutput": "",
                           "commitUrl": f"{self.server.address}/{repo}/commit/{REVISION}"})  # fmt: skip

    def _download(self, body, repo, name):
        content = self.server.repositories.get(repo, {}).get(name)
        if content is None:
            self._answer(404, x_error_code="EntryNotFound", x_repo_commit=REVISION)
        else:
            self._answer(200, content, etag=f'"{hashlib.sha256(content).hexdigest()}"', x_repo_commit=REVISION)

    def _list(self, body, repo):
        files = self.server.repositories[repo].items()
        self._answer(200, [{"type": "file", "oid": "", "size": len(data), "path": name} for name, data in files])

    def _about(self, body, repo):
        if repo not in self.server.repositories:
            self._answer(404, x_error_code="RepoNotFound")
            return
        names = [{"rfilename": name} for name in self.server.repositories[repo]]
        about = {"id": repo, "modelId": repo, "sha": REVISION, "private": False, "tags": [], "siblings": names}
        self._answer(200, about)


@contextlib.contextmanager
def running_hub(monkeypatch):
    """A server that this process takes for the Hub for as long as the block lasts; retries do not wait."""
    with HubServer() as server:
        for name, value in {"ENDPOINT": server.address, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(constants, name, value)
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
