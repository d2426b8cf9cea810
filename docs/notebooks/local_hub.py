# Licensed under the Apache License, Version 2.0.
"""A stand-in for the Hub on this machine: pushing and loading work as with https://huggingface.co, without an account.

    os.environ.update(start_hub())  # before Transformers is imported

Repositories are kept in memory, for as long as the process lives.
"""

import base64
import hashlib
import json
import re
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


USER = "tester"
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
    "download": r"/(?P<repo>.+?)/resolve/(?P<revision>[^/]+)/(?P<name>.+)",
    "list": r"/api/models/(?P<repo>.+?)/tree/(?P<revision>[^/]+).*",
    "about": r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?",
}


class LocalHub(ThreadingHTTPServer):
    """Repositories in memory.

    Attributes:
        address (`str`): Where it listens, on this machine only.
        repositories (`dict[str, dict[str, bytes]]`): Committed files by repository and name. `REPOSITORY@REVISION`
            holds those of another revision than `main`.
        settings (`dict[str, dict]`): What each repository was made with.
    """

    daemon_threads = True

    def __init__(self, handler=None):
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.settings: dict[str, dict] = {}
        self.blobs: dict[str, bytes] = {}

    def handle_error(self, request, client_address):
        """Clients that hang up are no news."""


class Handler(BaseHTTPRequestHandler):
    """Answers what `huggingface_hub` asks for when it pushes and loads."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        path, body = unquote(urlsplit(self.path).path), self._body()
        for stage, pattern in {**STAGES, **OTHERS}.items():
            if match := re.fullmatch(pattern, path):
                self.answer(stage, body, **match.groupdict())
                return
        self._answer(404)

    do_GET = do_HEAD = do_PUT = do_POST

    def answer(self, stage, body, **names):
        getattr(self, f"_{stage}")(body, **names)

    def _body(self):
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

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
        repo = "/".join([settings.get("organization") or USER, settings["name"].split("/")[-1]])
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

    def _files(self, repo, revision):
        """Files and commit of a revision, which is a name or a commit."""
        for own, files in self.server.repositories.items():
            name, _, branch = own.partition("@")
            if name == repo and revision in (branch or "main", commit_of(branch)):
                return files, commit_of(branch)
        known = any(own.partition("@")[0] == repo for own in self.server.repositories)
        self._answer(404, x_error_code="RevisionNotFound" if known else "RepoNotFound")
        return None, None

    def _download(self, body, repo, revision, name):
        files, commit = self._files(repo, revision)
        if files is not None and name not in files:
            self._answer(404, x_error_code="EntryNotFound", x_repo_commit=commit)
        elif files is not None:
            etag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
            self._answer(200, files[name], etag=etag, x_repo_commit=commit)

    def _list(self, body, repo, revision):
        files, _ = self._files(repo, revision)
        if files is not None:
            listed = files.items()
            self._answer(200, [{"type": "file", "oid": "", "size": len(data), "path": name} for name, data in listed])

    def _about(self, body, repo, revision):
        files, commit = self._files(repo, revision or "main")
        if files is not None:
            names = [{"rfilename": name} for name in files]
            about = {"id": repo, "modelId": repo, "sha": commit, "private": False, "tags": [], "siblings": names}
            self._answer(200, about)


def commit_of(branch: str) -> str:
    """The commit of a revision, whose name is empty for `main`."""
    return hashlib.sha1(branch.encode()).hexdigest() if branch else REVISION


def start_hub() -> dict[str, str]:
    """Starts a server in a thread of this process.

    Returns:
        `dict[str, str]`: environment variables with which a process takes it for the Hub, with a cache of its own.
    """
    hub = LocalHub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    online = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return {"HF_ENDPOINT": hub.address, "HF_TOKEN": "token", "HF_HOME": tempfile.mkdtemp(), **online}
