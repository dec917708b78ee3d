"""The Hugging Face hub: without it everything fails fast and quietly; names include a revision."""

import http.server
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.utils.hub_access import is_hub_reachable, offline_if_unreachable, split_revision


def test_an_unreachable_hub_fails_at_once_and_quietly(unreachable, capfd):
    load_backbone("tiny")  # imports Transformers, which takes seconds
    t = time.time()
    words = "no backbone 'roberta-larg'.* cannot be reached.* mean '.*large'"
    with pytest.raises(ValueError, match=words):
        load_backbone("roberta-larg")
    assert time.time() - t < 3 and unreachable.HF_HUB_OFFLINE is False  # put back
    assert "Retrying" not in "".join(capfd.readouterr())


ASK = """
import datasets, time
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.data.tasks import load_task
for f,name in (load_backbone,'roberta-larg'),(load_task,'sst2'):
    t = time.time()
    try: f(name)
    except ValueError as e: print(f'{time.time()-t:.2f} s: {e}')
"""


@pytest.mark.long
def test_an_offline_process_without_offline_settings_fails_fast(tmp_path):
    env = {k: v for k, v in os.environ.items() if "OFFLINE" not in k and "proxy" not in k.lower()}
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        env.update(HF_ENDPOINT=f"http://127.0.0.1:{s.getsockname()[1]}", HF_HOME=str(tmp_path))
        res = subprocess.run(
            [sys.executable, "-c", ASK], env=env, capture_output=True, text=True, timeout=100
        )
    assert res.returncode == 0, res.stderr
    output = [line.split(" s: ") for line in res.stdout.splitlines()]
    (backbone_seconds, backbone_message), (task_seconds, task_message) = output
    assert "no backbone 'roberta-larg'" in backbone_message
    assert (
        "cannot load nyu-mll/glue/sst2 from the Hugging Face hub (ConnectionError): connect to the"
        in task_message
    )
    assert float(backbone_seconds) < 3 and float(task_seconds) < 3 and "Retry" not in res.stderr


def test_a_hub_that_does_not_respond_times_out(unreachable, monkeypatch):
    with socket.socket() as s:  # takes calls, says nothing
        s.bind(("127.0.0.1", 0))
        s.listen()
        monkeypatch.setattr(unreachable, "ENDPOINT", f"http://127.0.0.1:{s.getsockname()[1]}")
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
        t = time.time()
        assert not is_hub_reachable() and 0.5 < time.time() - t < 2

    class Session:  # a name server that does not answer knows no time limit
        def head(self, *a, **kw):
            time.sleep(4)

    monkeypatch.setattr("idp_tutorial.utils.hub_access.get_session", Session)
    t = time.time()
    assert not is_hub_reachable() and time.time() - t < 2


def test_a_hub_that_answers_is_used(unreachable, monkeypatch):
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            requests.append(self.path)
            self.send_response(404)
            self.end_headers()

        do_GET = do_HEAD  # noqa: N815 (the name that http.server calls)

        def log_message(self, *a):
            pass

    requests = []
    server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(unreachable, "ENDPOINT", address)
    monkeypatch.setattr(
        unreachable,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    try:
        with pytest.raises(ValueError, match="no backbone 'my-model'.* does not have it"):
            load_backbone("my-model")
    finally:
        server.shutdown()
        server.server_close()
    assert any("my-model/resolve/main/config.json" in a for a in requests)


def test_the_clients_of_the_hub_are_offline_inside_the_block_only(unreachable):
    with offline_if_unreachable() as online:
        assert not online and unreachable.HF_HUB_OFFLINE
    assert not unreachable.HF_HUB_OFFLINE


def test_a_revision_is_split_from_a_name():
    assert split_revision("roberta-base@e2da8e2") == ("roberta-base", "e2da8e2")
    assert split_revision("me/mine") == ("me/mine", None)
