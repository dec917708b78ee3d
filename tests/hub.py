"""A fake Hugging Face Hub in this process, with the endpoints that `huggingface_hub` requests."""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

from huggingface_hub import constants

JSON = "application/json"


def git_blob_id(data):
    """Return the SHA-1 id that git gives to a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """Request handler of the fake hub, whose state is stored on its server.

    `server.refs` is {(repository, branch): commit}, `server.commits` is {commit: {file: bytes}},
    `server.private` is {repository: bool}, and `server.requests` lists all requests as (method,
    path, authorization header).
    """

    def log_message(self, *_):
        pass

    def respond(self, body=b"", status=200, kind=JSON, **headers):
        """Send bytes, or an object as JSON; a header's name is written with underscores."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def resolve_commit(self, repo, revision):
        """Return the commit of a branch or commit; an empty string if there is none."""
        if (repo, revision) in self.server.refs:
            return self.server.refs[repo, revision]
        return revision if revision in self.server.commits else ""

    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        self.server.requests.append((self.command, path, self.headers.get("Authorization")))
        if path == "/":
            return self.respond()
        info_request = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
        file_request = re.fullmatch(r"/(.+/.+)/resolve/([^/]+)/(.+)", path)
        if info_request:
            repo, endpoint, revision = info_request.groups()
            commit = self.resolve_commit(repo, revision)
            if commit:
                return self.respond(self.list_files(repo, commit, endpoint))
        elif file_request:
            repo, revision, name = file_request.groups()
            commit = self.resolve_commit(repo, revision)
            data = self.server.commits.get(commit, {}).get(name)
            if data is not None:
                kind = "application/octet-stream"
                etag = f'"{git_blob_id(data)}"'
                return self.respond(data, kind=kind, ETag=etag, X_Repo_Commit=commit)
        self.respond(dict(error="not found"), 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET  # noqa: N815 (the name that http.server calls)

    def list_files(self, repo, commit, endpoint):
        """Return the answer to a request for a file tree or for a repository's description."""
        files = self.server.commits[commit]
        if endpoint == "tree":
            return [
                dict(type="file", path=name, size=len(data), oid=git_blob_id(data))
                for name, data in files.items()
            ]
        return dict(id=repo, sha=commit, siblings=[dict(rfilename=name) for name in files])

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path)
        self.server.requests.append(("POST", self.path, self.headers.get("Authorization")))
        if self.path == "/api/repos/create":
            return self.create_repo(json.loads(body))
        repo, endpoint, revision = re.fullmatch(
            r"/api/(?:models/([^/]+/[^/]+)/)?([a-z-]+)/?(.*)", path
        ).groups()
        if endpoint == "branch":
            self.server.refs.setdefault((repo, revision), self.server.refs[repo, "main"])
        elif endpoint == "preupload":
            uploads = [
                dict(path=f["path"], uploadMode="regular", shouldIgnore=False, oid=None)
                for f in json.loads(body)["files"]
            ]
            return self.respond(dict(files=uploads))
        elif endpoint == "commit":
            return self.create_commit(repo, revision, body)
        self.respond({})

    def create_repo(self, request):
        repo = f"{request.get('organization', 'me')}/{request['name']}"
        self.server.private[repo] = (
            request.get("private", False) or request.get("visibility") == "private"
        )
        self.server.refs.setdefault((repo, "main"), self.add_commit({}))
        self.respond(dict(url=f"{constants.ENDPOINT}/{repo}", name=repo, id="1"))

    def create_commit(self, repo, revision, body):
        lines = [json.loads(line) for line in body.splitlines()]
        files = [line["value"] for line in lines if line["key"] == "file"]
        new_files = {f["path"]: base64.b64decode(f["content"]) for f in files}
        parent = self.server.commits[self.server.refs[repo, revision]]
        commit = self.add_commit({**parent, **new_files})
        self.server.refs[repo, revision] = commit
        url = f"{constants.ENDPOINT}/{repo}/commit/{commit}"
        self.respond(dict(commitUrl=url, commitOid=commit))

    def add_commit(self, files):
        """Store a commit with these files and return its id."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.server.commits[commit] = files
        return commit


def start_hub(monkeypatch, cache):
    """Start a fake hub and point `huggingface_hub` to it.

    `huggingface_hub` reads HF_ENDPOINT when it is imported, so its constants are replaced.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.refs = {}
    server.commits = {}
    server.private = {}
    server.requests = []
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    Thread(target=server.serve_forever, daemon=True).start()
    return server
