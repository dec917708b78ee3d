"""Many tasks behind one address: together or alone the same answers; what is refused."""

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from small import backbone, config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.cli.serve import Batcher, create_app, serve_command
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.saving.prompt_files import save_pretrained
from idp_tutorial.serving.multitask import MultiTaskModel, TaskModel
from idp_tutorial.utils import checks


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
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

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
    with TestClient(create_app(model, max_wait=0.2)) as client, ThreadPoolExecutor(12) as pool:
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


def test_a_bad_request_is_refused_alone(model):
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    with TestClient(create_app(model)) as client:
        for row, words in (
            (dict(task="moods", sentence1="x"), "did you mean 'mood'?"),
            (dict(task="close", sentence1="x"), "no sentence2"),
            (dict(sentence1="x"), "unknown task"),
        ):
            r = client.post("/answer", json=row)
            assert r.status_code == 422 and words in json.dumps(r.json()), r.text
        for body, words in (
            (
                rb'{"task": "mood", "sentence1": "\ud800"}',
                "row 0: sentence1 contains a lone surrogate",
            ),
            (rb'["\ud800"]', "is not a row"),
            (rb'{"task": "mood", "\udfff": 1}', "no sentence1"),
            (b"[1]", "not a row"),
        ):
            r = client.post("/answer", content=body, headers={"content-type": "application/json"})
            assert r.status_code == 422 and words in r.json()["detail"], r.text
        assert client.post("/answer", json=dict(task="mood", sentence1="x")).status_code == 200


def test_an_error_is_that_of_its_own_row():
    def answer(rows):
        return [1 / r for r in rows]

    async def submit_all():
        batcher = Batcher(answer, 8)
        at_work = asyncio.create_task(batcher.run())
        outcomes = await asyncio.gather(*map(batcher.submit, (2, 0, 4)), return_exceptions=True)
        at_work.cancel()
        return outcomes

    good, bad, more = asyncio.run(submit_all())
    assert (good, more) == (0.5, 0.25) and isinstance(bad, ZeroDivisionError)


def test_folders_of_any_name_are_served(model, tmp_path):
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    names = "1", "train", "a.b", "items", "training"
    for n in names:
        save_pretrained(
            model.task_models["mood"].model, tmp_path / n, *model.task_models["mood"][1:]
        )
    many = MultiTaskModel.from_pretrained([tmp_path / n for n in names], model.backbone)
    with TestClient(create_app(many)) as client:
        want = client.post("/answer", json=dict(task="train", sentence1="tea")).json()
        for n in (1, *names):
            r = client.post("/answer", json=dict(task=n, sentence1="tea"))
            assert r.status_code == 200 and r.json()["probabilities"] == pytest.approx(
                want["probabilities"], abs=1e-5
            )


def test_what_cannot_be_served(monkeypatch, capsys, tmp_path):
    pytest.importorskip("fastapi")
    bb = backbone()
    cfg = config(method="lpt", task="copa")
    with pytest.raises(ValueError, match="a request has one row"):
        create_app(
            MultiTaskModel(
                {"copa": TaskModel(build_model(cfg, bb, TASKS["copa"]), TASKS["copa"], cfg)}
            )
        )
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
        "fastapi is not installed: install it with pip install 'idp_tutorial[serve]'"
        in capsys.readouterr().err
    )
