"A hub in this process: the addresses that `huggingface_hub` asks for repositories, branches, commits and files."
import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

from huggingface_hub import constants

JSON = 'application/json'


def oid(data): # as git names a file
    return hashlib.sha1(b'blob %d\0'%len(data)+data).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """Its `server` holds `refs`, {(repository, branch): commit}, `commits`, {commit: {file: bytes}}, and `asked`,
    every request"""
    def log_message(self, *_): pass

    def say(self, body=b'', status=200, kind=JSON, **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name,value in {'Content-Type':kind, 'Content-Length':str(len(body)), **headers}.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        if self.command!='HEAD':
            self.wfile.write(body)

    def commit_of(self, repo, revision):
        "The commit of a branch, or of itself"
        return self.server.refs.get((repo, revision)) or revision*(revision in self.server.commits)

    def do_GET(self):
        path = unquote(self.path.partition('?')[0])
        self.server.asked.append((self.command, path, self.headers.get('Authorization')))
        if path=='/':
            return self.say()
        if found := re.fullmatch(r'/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)', path):
            if commit := self.commit_of(found[1], found[3]):
                files = self.server.commits[commit]
                tree = [dict(type='file', path=name, size=len(data), oid=oid(data)) for name,data in files.items()]
                info = dict(id=found[1], sha=commit, siblings=[dict(rfilename=name) for name in files])
                return self.say(tree if found[2]=='tree' else info)
        elif found := re.fullmatch(r'/(.+/.+)/resolve/([^/]+)/(.+)', path):
            commit = self.commit_of(found[1], found[2])
            data = self.server.commits.get(commit, {}).get(found[3])
            if data is not None:
                return self.say(data, kind='application/octet-stream', ETag=f'"{oid(data)}"', X_Repo_Commit=commit)
        self.say(dict(error='not found'), 404, X_Error_Code='RepoNotFound')

    do_HEAD = do_GET

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        self.server.asked.append(('POST', self.path, self.headers.get('Authorization')))
        if self.path=='/api/repos/create':
            said = json.loads(body)
            repo = f"{said.get('organization', 'me')}/{said['name']}"
            self.server.private[repo] = said.get('private', False) or said.get('visibility')=='private'
            self.server.refs.setdefault((repo, 'main'), self.keep({}))
            return self.say(dict(url=f'{constants.ENDPOINT}/{repo}', name=repo, id='1'))
        path = unquote(self.path)
        repo,what,revision = re.fullmatch(r'/api/(?:models/([^/]+/[^/]+)/)?([a-z-]+)/?(.*)', path).groups()
        if what=='branch':
            self.server.refs.setdefault((repo, revision), self.server.refs[repo,'main'])
        elif what=='preupload':
            return self.say(dict(files=[dict(path=f['path'], uploadMode='regular', shouldIgnore=False, oid=None)
                for f in json.loads(body)['files']]))
        elif what=='commit':
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line['value'] for line in lines if line['key']=='file']
            new = {f['path']: base64.b64decode(f['content']) for f in files}
            commit = self.keep({**self.server.commits[self.server.refs[repo,revision]], **new})
            self.server.refs[repo,revision] = commit
            return self.say(dict(commitUrl=f'{constants.ENDPOINT}/{repo}/commit/{commit}', commitOid=commit))
        self.say({})

    def keep(self, files):
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.server.commits[commit] = files
        return commit


def started(monkeypatch, cache):
    "A hub, and `huggingface_hub` as if HF_ENDPOINT, which it reads when it is imported, had named it"
    server = ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    server.refs,server.commits,server.private,server.asked = {},{},{},[]
    address = f'http://127.0.0.1:{server.server_port}'
    files = address+'/{repo_id}/resolve/{revision}/{filename}'
    for name,value in dict(ENDPOINT=address, HUGGINGFACE_CO_URL_TEMPLATE=files, HF_HUB_OFFLINE=False,
        HF_HUB_CACHE=str(cache)).items():
        monkeypatch.setattr(constants, name, value)
    Thread(target=server.serve_forever, daemon=True).start()
    return server
