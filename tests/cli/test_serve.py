"""`idp serve`: addresses that cannot be served, and the process: limits of connections, its end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from small import config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.cli.serve import _bind_socket, serve_command
from idp_tutorial.saving.prompt_files import save_pretrained
from idp_tutorial.utils import checks

pytest.importorskip("uvicorn")
SERVE = """
import sys
from idp_tutorial.serving import server
server._HEAD_TIMEOUT = 1.0  # seconds for the head of a request
from idp_tutorial.cli.main import main
main(["serve", *sys.argv[1:]])
"""


@pytest.fixture
def server(small_folder, tmp_path):
    """Return a running server with one task, its port, and a function that sends a request."""
    task = small_task()
    cfg = config(backbone=str(small_folder), method="lpt", task=task.name)
    model = build_model(cfg, load_backbone(cfg.backbone), task)
    save_pretrained(model, tmp_path / "folder", task, cfg)
    argv = [str(tmp_path / "folder"), "--port", "0", "--max_body", "20000"]
    argv += ["--backbone", str(small_folder)]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    assert "(tasks: sentiment; Ctrl-C stops the server)" in line, process.communicate()[1]
    yield process, int(line.split("/")[2].split(":")[1])
    process.kill()
    process.communicate()


def ask(port, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/answer", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


CLIENT = """
import socket, sys, time
port, kind = int(sys.argv[1]), sys.argv[2]
body = b'{"text": ["the tea was cold"' + b', "and so was the rain"' * 20 + b"]}"
head = b"POST /answer HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
head += b"Content-Length: %d\\r\\n\\r\\n" % len(body)
data = {"head": head[:20], "body": head + body[:9], "answer": head + body}[kind]
connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(15)]
for connection in connections:
    connection.sendall(data)
print("sent", flush=True)
time.sleep(60)
"""


def count_open_files(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def memory_mb(process):
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def check_killed_clients(process, port):
    """Kill clients in mid-request: the server answers, and keeps neither sockets nor memory."""
    ask(port, b'{"text": "tea"}')
    before = count_open_files(process), memory_mb(process)
    for kind in ("head", "body", "answer"):
        argv = [sys.executable, "-S", "-c", CLIENT, str(port), kind]
        client = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert client.stdout.readline() == b"sent\n"
        client.kill()
        client.communicate()
        assert "label" in ask(port, b'{"text": "tea"}')
    deadline = time.monotonic() + 20
    while count_open_files(process) > before[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert count_open_files(process) <= before[0] and memory_mb(process) < before[1] + 100


def check_odd_bodies(port):
    """Send a body that is far too large, and one in very many chunks."""
    head = b"POST /answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as large:
        large.settimeout(15)
        large.sendall(head + b"Content-Length: 10000000\r\n\r\n" + b" " * 10_000_000)
        assert large.recv(100).startswith(b"HTTP/1.1 413")
    for n_chunks, status in ((9000, b"200"), (10_001, b"400")):
        body = b'{"text": "tea"'.ljust(n_chunks - 1) + b"}"
        with socket.create_connection(("127.0.0.1", port)) as chunked:
            chunked.settimeout(15)
            chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
            chunked.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
            assert chunked.recv(100).split()[1] == status
    evil = urllib.request.Request(f"http://127.0.0.1:{port}/tasks", headers={"Host": "evil.org"})
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(evil, timeout=30)


@pytest.mark.long
def test_a_process_answers_drops_slow_clients_and_stops(server):
    process, port = server
    for _ in range(100):
        try:
            assert ask(port, b'{"text": "tea"}').keys() == {"label", "probabilities"}
            break
        except OSError:
            time.sleep(0.1)
    check_killed_clients(process, port)
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for connection in slow:
        connection.sendall(b"POST /answer HTTP/1.1\r\nHost: localhost\r\n")
    for connection in slow:  # a head that does not end: the connection is closed after a second
        connection.settimeout(15)
        assert connection.recv(1) == b""
        connection.close()
    with socket.create_connection(("127.0.0.1", port)) as large:
        large.sendall(
            b"POST /answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 30000\r\n\r\n"
        )
        large.settimeout(15)
        assert large.recv(100).startswith(b"HTTP/1.1 413")  # before the body is sent
    check_odd_bodies(port)
    head = b"POST /answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(head + b'Content-Length: 100\r\n\r\n{"text')
        assert ask(port, b'{"text": ["tea", "rain"]}')[1]["label"]  # others are not disturbed
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=15)
    assert time.monotonic() - start < 12 and "Traceback" not in process.stderr.read()


def test_what_cannot_be_served(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        serve_command(models=str(tmp_path / "nowhere"), port=0)
    assert "no prompts.safetensors" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as other:
        for kwargs in (
            dict(port=other.getsockname()[1]),
            dict(host="192.0.2.1", port=0),
            dict(host="no.where.invalid"),
        ):
            with pytest.raises(SystemExit) as e:
                serve_command(models=str(tmp_path / "nowhere"), **kwargs)
            err = capsys.readouterr().err
            assert e.value.code == 2 and "cannot be served (" in err and err.count("\n") == 1
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        serve_command(models="a")
    assert (
        "fastapi is not installed: run pip install 'idp_tutorial[serve]'" in capsys.readouterr().err
    )


def test_a_small_answer_is_sent_at_once():
    """Without TCP_NODELAY each answer to a client on the same connection waited 40 ms."""
    with _bind_socket("127.0.0.1", 0) as listening:
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
