"""Records: their fields, how they are written and read, and digests of what a run read."""

import json

import pytest
from small import config, small_task

from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.record import Record, build_record, format_summary_line
from idp_tutorial.utils.records import SCHEMA_VERSION

DIGESTS = dict(weights="a" * 16, data="b" * 16)
SIZES = dict(train=4, validation=2, test=2)


def make(**values):
    return build_record(config(), DIGESTS, SIZES, 0.0, **values)


def test_a_record_is_read_as_it_was_written():
    record = make(metric="accuracy", score=70.0, figure="lpt-f6")
    line = json.loads(json.dumps(record.to_dict()))
    assert Record.from_dict(line).to_dict() == line
    assert (line["schema"], line["status"], line["seed"]) == (SCHEMA_VERSION, "done", 0)
    assert record.details == {"figure": "lpt-f6"} and line["figure"] == "lpt-f6"


def test_fields_of_the_config_can_be_replaced():
    record = make(layer=3, lr=0.5)
    assert (record.config["layer"], record.config["lr"]) == (3, 0.5)


def test_a_field_without_a_value_is_left_out():
    assert {"score", "message", "params"}.isdisjoint(make().to_dict())


def test_a_record_of_another_schema_or_without_digests_is_refused():
    line = make().to_dict()
    with pytest.raises(ValueError, match="the record has schema 1, and this version reads schema"):
        Record.from_dict({**line, "schema": 1})
    with pytest.raises(ValueError, match="the record has no 'digests': run it again"):
        Record.from_dict({name: value for name, value in line.items() if name != "digests"})


def test_the_summary_line_has_the_learning_rate_and_the_score():
    finished = make(metric="accuracy", score=70.0, lr=1e-2)
    diverged = make(status="diverged", message="the loss is nan", lr=1e-2)
    assert format_summary_line(finished.to_dict()) == "lr 1.0e-02  accuracy 70.0"
    assert format_summary_line(diverged.to_dict()) == "lr 1.0e-02  diverged: the loss is nan"
    assert finished.is_finished and not diverged.is_finished


def test_a_finished_and_a_diverged_run_have_the_same_digests(small_folder):
    task = small_task()
    experiment = Experiment(config(backbone=str(small_folder), steps=1, eval_every=1), task)
    model, record = experiment.train()
    assert model is not None and record.digests == experiment.record_divergence("nan").digests
    assert record.digests["data"] == task.digest()
    untested = experiment.record_divergence("nan", score_test=False)
    assert untested.digests["data"] == task.digest(include_test=False)
