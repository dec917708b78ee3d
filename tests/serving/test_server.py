"""The HTTP application: joint batches, requests, limits and errors."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from small import backbone, config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.saving.prompt_files import save_pretrained
from idp_tutorial.serving.limits import ServerLimits
from idp_tutorial.serving.multitask import MultiTaskModel, TaskModel
from idp_tutorial.serving.server import Batcher, _make_predict, create_app

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient


@pytest.fixture(scope="module")
def model():
    bb = backbone()

    def member(method, task):
        cfg = config(method=method, task=task.name, max_len=60)
        return TaskModel(build_model(cfg, bb, task), task, cfg)

    return MultiTaskModel(
        {
            "mood": member("lpt", small_task()),
            "close": member("prompt-tuning", small_task("similarity")),
        }
    )


def test_requests_of_several_tasks_share_a_batch(model, monkeypatch):
    sizes = []
    plain = model.predict

    def answer(rows, *a, **k):
        sizes.append(len({r["task"] for r in rows}))
        return plain(rows, *a, **k)

    monkeypatch.setattr(model, "predict", answer)
    rows = [
        dict(task="mood", sentence1=f"tea {i}")
        if i % 2
        else dict(task="close", sentence1="a", sentence2=f"b {i}")
        for i in range(12)
    ]
    with (
        TestClient(create_app(model, ServerLimits(wait_ms=200))) as client,
        ThreadPoolExecutor(12) as pool,
    ):
        responses = [*pool.map(lambda r: client.post("/answer", json=r), rows)]
        assert client.get("/tasks").json()["mood"]["labels"] == ["negative", "positive"]
    assert len(sizes) < 12 and max(sizes) == 2
    for r, s in zip(rows, responses):
        (want,) = plain([r], probabilities=True)
        got = s.json()
        assert s.status_code == 200 and got.keys() == want.keys()
        if r["task"] == "mood":
            assert got["probabilities"] == pytest.approx(want["probabilities"], abs=1e-5)
        else:
            assert got["value"] == pytest.approx(want["value"], abs=1e-4)


@pytest.fixture(scope="module")
def one(model):
    """Return a model with a single task."""
    return MultiTaskModel({"mood": model.task_models["mood"]})


def test_a_text_or_a_list_of_texts_is_predicted(model, one):
    with TestClient(create_app(one)) as client:
        alone = [client.post("/answer", json=dict(text=t)).json() for t in ("tea", "rain")]
        together = client.post("/answer", json=dict(text=["tea", "rain"])).json()
        assert [a["label"] for a in alone] == [a["label"] for a in together]
        for a, b in zip(alone, together):
            assert a["probabilities"] == pytest.approx(b["probabilities"], abs=1e-5)
        old = client.post("/answer", json=dict(task="mood", sentence1="tea", id=3)).json()
        assert old["probabilities"] == pytest.approx(alone[0]["probabilities"], abs=1e-5)
    with TestClient(create_app(model)) as client:
        pairs = dict(task="close", text=["a", "b"], text2=["c", "d"])
        assert len(client.post("/answer", json=pairs).json()) == 2
        assert client.post("/answer", json=dict(pairs, task="")).status_code == 422
        assert "value" in client.post("/answer", json=dict(pairs, text="a", text2="b")).json()


NEEDS_TEXT = "task 'mood' needs one field 'text' with a text or a list of texts: send an object"
REFUSED = [  # request, words of the answer
    (dict(task="moods", text="x"), "unknown task 'moods': did you mean 'mood'?"),
    (dict(text="x"), "the request needs the field 'task', one of mood, close."),
    (dict(task=["mood"], text="x"), "unknown task"),
    (dict(task="mood", txt="x"), NEEDS_TEXT),
    (dict(task="close", text="x"), "task 'close' needs one field 'text2'"),
    (dict(task="close", text=["x"], text2="y"), "a request needs one text or a non-empty list"),
    (
        dict(task="close", text=["x", "y"], text2=["y"]),
        "a request needs one text or a non-empty list",
    ),
    (dict(task="mood", text="x", text2="y"), "task 'mood' has one text, but the request has two"),
    (dict(task="mood", text="x", sentence1="y"), NEEDS_TEXT),
    (dict(task="mood", text=[]), "a request needs one text or a non-empty list"),
    (dict(task="mood", text={"a": 1}), NEEDS_TEXT),
    (dict(task="mood", text=["a", " "]), "text 1: text must be a text that is not empty, got ' '"),
    (dict(task="mood", text=3), NEEDS_TEXT),
    (dict(task="mood", text=["a", None]), "text 1: text must be a text that is not empty"),
    (dict(task="mood", text="a\0"), "text contains a NUL character"),
    (b'{"task": "mood", "text": "\\ud800"}', "contains a lone surrogate"),
    (b"[1]", "the request: [1] is not an object: send an object such as"),
    (b"{", "the request is not valid JSON"),
    (b"[" * 100_000, "the request is not valid JSON"),
    (b'{"task": "mood", "text": "\xe9"}', "contains a lone surrogate"),
]


def test_a_bad_request_is_refused_alone(model):
    json_type = {"content-type": "application/json"}
    with TestClient(create_app(model)) as client:
        for request, words in REFUSED:
            content = request if isinstance(request, bytes) else json.dumps(request)
            r = client.post("/answer", content=content, headers=json_type)
            assert r.status_code == 422 and words in r.json()["detail"], r.text
        assert client.post("/answer", json=dict(task="mood", text="x")).status_code == 200


def test_an_error_has_a_limited_size(model):
    with TestClient(create_app(model)) as client:
        for request in (dict(task="x" * 10**5), {"y" * 10**5: 1, "task": "mood"}):
            r = client.post("/answer", json=request)
            assert r.status_code == 422 and len(r.content) < 700


def test_a_request_has_limits(one):
    limits = ServerLimits(max_body=2000, max_texts=3)
    with TestClient(create_app(one, limits=limits)) as client:
        r = client.post("/answer", json=dict(text=["a"] * 4))
        assert r.status_code == 413 and "has 4 texts, and this server takes 3" in r.text
        r = client.post("/answer", json=dict(text="a" * 2000))
        assert r.status_code == 413 and "more than 2,000 bytes" in r.text
        chunks = (b" " * 500 for _ in range(9))  # without a content length
        r = client.post("/answer", content=chunks, headers={"content-type": "application/json"})
        assert r.status_code == 413 and "more than 2,000 bytes" in r.text
        for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
            r = client.post("/answer", content=b"{}", headers={"content-type": content_type})
            assert r.status_code == 415 and "Content-Type: application/json" in r.json()["detail"]
        r = client.post(
            "/answer",
            content=b'{"text": "a"}',
            headers={"content-type": "application/json; charset=utf-8"},
        )
        assert r.status_code == 200
    with pytest.raises(ValueError, match="max_texts=5 texts of a request could never wait"):
        ServerLimits(max_texts=5, max_waiting=4)


def test_requests_that_wait_have_a_limit_and_a_time(one, monkeypatch):
    release = threading.Event()
    plain = one.predict

    def slow(rows, **options):
        release.wait(20)
        return plain(rows, **options)

    monkeypatch.setattr(one, "predict", slow)
    limits = ServerLimits(max_texts=2, max_waiting=2, timeout=0.5)
    with (
        TestClient(create_app(one, limits=limits)) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        assert client.get("/ready").json() == {"status": "ready"}
        first = pool.submit(client.post, "/answer", json=dict(text=["a", "b"]))
        while client.get("/ready").status_code == 200:
            pass
        r = client.post("/answer", json=dict(text="c"))
        assert r.status_code == 503 and r.headers["retry-after"] == "1" and "busy" in r.text
        assert client.get("/health").json() == {"status": "ok"}  # it is alive, but not ready
        assert first.result().status_code == 503  # it took longer than half a second
        release.set()
        assert client.get("/ready").status_code == 200
        assert client.post("/answer", json=dict(text="c")).status_code == 200


def test_a_bug_is_not_sent(one, monkeypatch):
    def fail(rows, **options):
        raise RuntimeError("a secret")

    monkeypatch.setattr(one, "predict", fail)
    with TestClient(create_app(one), raise_server_exceptions=False) as client:
        r = client.post("/answer", json=dict(text="c"))
    assert r.status_code == 500 and "secret" not in r.text


def test_a_text_that_is_cut_has_the_same_prediction(one):
    text = "the tea was cold and the rain was loud , " * 2000
    (want,) = one.predict([dict(task="mood", sentence1=text)], probabilities=True)
    with TestClient(create_app(one)) as client:
        got = client.post("/answer", json=dict(text=text)).json()
    assert got["probabilities"] == pytest.approx(want["probabilities"], abs=1e-6)


def test_an_error_is_that_of_its_own_row():
    def answer(rows):
        return [1 / r for r in rows]

    async def submit_all():
        batcher = Batcher(answer, 8, max_wait=0.005)
        at_work = asyncio.create_task(batcher.run())
        outcomes = await asyncio.gather(*map(batcher.submit, (2, 0, 4)), return_exceptions=True)
        at_work.cancel()
        return outcomes

    good, bad, more = asyncio.run(submit_all())
    assert (good, more) == (0.5, 0.25) and isinstance(bad, ZeroDivisionError)


def test_folders_of_any_name_are_served(model, tmp_path):
    names = "1", "train", "a.b", "items", "training"
    for n in names:
        save_pretrained(
            model.task_models["mood"].model, tmp_path / n, *model.task_models["mood"][1:]
        )
    many = MultiTaskModel.from_pretrained([tmp_path / n for n in names], model.backbone)
    with TestClient(create_app(many)) as client:
        want = client.post("/answer", json=dict(task="train", sentence1="tea")).json()
        for n in names:
            r = client.post("/answer", json=dict(task=n, sentence1="tea"))
            assert r.status_code == 200 and r.json()["probabilities"] == pytest.approx(
                want["probabilities"], abs=1e-5
            )


def test_a_task_that_chooses_among_rows_is_not_served():
    cfg = config(method="lpt", task="copa")
    task = TASKS["copa"]
    member = TaskModel(build_model(cfg, backbone(), task), task, cfg)
    with pytest.raises(ValueError, match="a request has one row"):
        create_app(MultiTaskModel({"copa": member}))


def test_a_full_batch_is_predicted_at_once(monkeypatch):
    """The batcher waits for more rows only if the batch has room for them."""
    batches = []
    waits = []
    sleep = asyncio.sleep

    async def count_wait(seconds):
        waits.append(seconds)
        await sleep(0)

    def answer(rows):
        batches.append(list(rows))
        return rows

    async def submit_all():
        batcher = Batcher(answer, 2, max_wait=60)
        at_work = asyncio.create_task(batcher.run())
        await asyncio.gather(*map(batcher.submit, range(5)))
        at_work.cancel()

    monkeypatch.setattr(asyncio, "sleep", count_wait)
    asyncio.run(submit_all())
    assert batches == [[0, 1], [2, 3], [4]] and waits == [60]


def test_a_batch_of_the_server_is_a_batch_of_the_model(one):
    """A model that splits its rows in batches of 16 by default gets the size of the batch."""
    batches = []

    def predict(rows, batch_size=16, probabilities=False):
        batches.extend(rows[i : i + batch_size] for i in range(0, len(rows), batch_size))
        return rows

    model = SimpleNamespace(backbone=one.backbone, task_models=one.task_models, predict=predict)
    rows = [dict(task="mood", sentence1=f"tea {i}") for i in range(40)]
    assert _make_predict(model)(rows) == rows and len(batches) == 1


class Panic(BaseException):
    """A panic of a library written in Rust, such as tokenizers."""


Panic.__module__ = "pyo3_runtime"


def test_a_panic_of_a_library_ends_one_request_only(one, monkeypatch):
    plain = one.predict

    def predict(rows, **options):
        if any("panic" in row["sentence1"] for row in rows):
            raise Panic("index out of range")
        return plain(rows, **options)

    monkeypatch.setattr(one, "predict", predict)
    with TestClient(create_app(one), raise_server_exceptions=False) as client:
        assert client.post("/answer", json=dict(text="panic")).status_code == 500
        assert client.get("/ready").status_code == 200
        assert client.post("/answer", json=dict(text="tea")).status_code == 200
        texts = dict(text=["tea", "panic", "rain"])
        assert client.post("/answer", json=texts).status_code == 500
        assert client.post("/answer", json=dict(text="tea")).status_code == 200


def test_a_tokenizer_that_panics_at_a_text_is_a_refusal(one, monkeypatch):
    tokenizer = one.backbone.tokenizer
    plain = type(tokenizer)._encode_plus

    def encode(self, text, *args, **options):
        if "panic" in str(text):
            raise Panic("Onig: Regex search error")
        return plain(self, text, *args, **options)

    monkeypatch.setattr(type(tokenizer), "_encode_plus", encode)
    with TestClient(create_app(one)) as client:
        r = client.post("/answer", json=dict(text="panic"))
        assert r.status_code == 422 and "the tokenizer fails with an error" in r.json()["detail"]
        assert client.post("/answer", json=dict(text="tea")).status_code == 200


def test_the_worker_survives_an_error_of_its_own(monkeypatch):
    async def submit_all():
        batcher = Batcher(lambda rows: rows, 1, max_wait=0)
        plain = batcher._predict_each
        calls = []

        async def predict_each(rows):
            calls.append(rows)
            if len(calls) == 1:
                raise RuntimeError("a bug")
            return await plain(rows)

        monkeypatch.setattr(batcher, "_predict_each", predict_each)
        at_work = asyncio.create_task(batcher.run())
        lost = asyncio.create_task(batcher.submit("lost"))
        await asyncio.sleep(0.05)
        answer = await asyncio.wait_for(batcher.submit("a"), 10)
        lost.cancel()
        at_work.cancel()
        return answer

    assert asyncio.run(submit_all()) == "a"


def call_app(app, messages, headers=()):
    """Call POST /answer of an application with the messages of a client; return what it sends."""
    scope = dict(type="http", method="POST", path="/answer", query_string=b"", http_version="1.1")
    json_type = (b"content-type", b"application/json")
    scope |= dict(headers=[json_type, *headers], asgi={"version": "3.0"}, root_path="")
    sent = []

    async def call():
        async def receive():
            if messages:
                return messages.pop(0)
            await asyncio.sleep(3600)

        async def send(message):
            sent.append(message)

        async with app.router.lifespan_context(app):
            await app(scope, receive, send)

    asyncio.run(call())
    return sent


def test_texts_of_a_client_that_has_gone_are_not_predicted(one, monkeypatch):
    predicted = []
    monkeypatch.setattr(one, "predict", lambda rows, **options: predicted.extend(rows))
    app = create_app(one, ServerLimits(wait_ms=60_000, batch_size=1000))
    body = dict(type="http.request", body=b'{"text": "tea"}', more_body=False)
    sent = call_app(app, [body, dict(type="http.disconnect")])
    assert sent[0]["status"] == 400 and not predicted


def test_a_body_that_is_too_large_is_read_before_the_answer(one):
    """A client that is still sending when the connection closes does not see the answer."""
    part = dict(type="http.request", body=b" " * 1000, more_body=True)
    messages = [dict(part) for _ in range(20)] + [dict(part, more_body=False)]
    sent = call_app(create_app(one, ServerLimits(max_body=2000)), messages)
    assert sent[0]["status"] == 413 and not messages
    messages = [dict(part)]  # its size is declared, and the client waits for permission to send it
    headers = [(b"content-length", b"10000000"), (b"expect", b"100-continue")]
    sent = call_app(create_app(one, ServerLimits(max_body=2000)), messages, headers)
    assert sent[0]["status"] == 413 and len(messages) == 1


HOSTS = {
    "localhost": True,
    "localhost:8000": True,
    "LocalHost.": True,
    "127.0.0.1:8000": True,
    "[::1]:8000": True,
    "10.2.3.4": True,
    "models.example.org": True,
    "evil.example.org": False,
    "localhost.evil.example.org:8000": False,
    "127.0.0.1.evil.example.org": False,
    "": False,
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_request_to_another_name_is_refused(one, host):
    """The name of a page's own server may have been made to point to this machine."""
    with TestClient(create_app(one, host_names=["localhost", "models.example.org"])) as client:
        for method, path in (("GET", "/tasks"), ("GET", "/health"), ("POST", "/answer")):
            r = client.request(
                method,
                path,
                json=dict(text="tea") if method == "POST" else None,
                headers={"host": host},
            )
            assert r.status_code == (200 if HOSTS[host] else 421)


def test_no_page_loads_scripts_from_another_server(one):
    with TestClient(create_app(one)) as client:
        assert client.get("/docs").status_code == client.get("/redoc").status_code == 404
        assert "/answer" in client.get("/openapi.json").json()["paths"]
