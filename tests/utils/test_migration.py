"""Records, timings, saved descriptions and YAML files of version 0.2 get the names of 0.3."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from idp_tutorial.utils.config import RunConfig
from idp_tutorial.utils.durable import dump_record, load_record
from idp_tutorial.utils.migration import (
    RENAMED_OPTIONS,
    RENAMED_RECORD_KEYS,
    RENAMED_TASK_FIELDS,
    explain_renamed_option,
    main,
    migrate_description,
    migrate_file,
    migrate_options,
    migrate_record,
    migrate_task,
)
from idp_tutorial.utils.provenance import SCHEMA_1_DEFAULTS, upgrade_record
from idp_tutorial.utils.records import read_records

ROOT = Path(__file__).resolve().parents[2]

SCHEMA_1 = dict(method="lpt", task="trec", k=100, t=10, layer=12, seed=0, readout="cls", score=81.5)
SCHEMA_2 = dict(
    schema=2,
    method="m-idpg-phm",
    task="trec",
    k=None,
    draw=3,
    plain_draw=False,
    t=5,
    m=16,
    readout="mean",
    share="S",
    reads="layer0",
    inject="replace",
    way=None,
    start=None,
    seed=1,
    score=80.0,
    tried={"0.001": 79.0},
    edge=False,
    sizes=dict(train=100),
    found=dict(variance=0.5),
    errors={"found.variance": 0.1, "score": 0.2},
    made=dict(command="idp_compare", commit="abc", clean=True, start="2026-01-01T00:00:00Z"),
)
TIMING = dict(method="lpt", layer=12, cached=False, t=5, ms=1.5, share=0.9, part="methods")


def test_every_new_option_name_is_an_option():
    from idp_tutorial.assembly.options import METHOD_OPTIONS, TRAINING_OPTIONS

    known = {*asdict(RunConfig()), *METHOD_OPTIONS, *TRAINING_OPTIONS, "evaluations", "split_seeds"}
    assert set(RENAMED_OPTIONS.values()) <= known | {"tune_head_first", "learning_rates"}
    assert not set(RENAMED_OPTIONS) & set(asdict(RunConfig()))


def test_a_record_of_schema_1_gets_new_names_and_the_old_defaults():
    record = upgrade_record(SCHEMA_1)
    assert record["schema"] == 1 and record["score"] == 81.5
    assert (record["shots"], record["prompt_length"], record["pooling"]) == (100, 10, "cls")
    assert record["prompt_dropout"] == SCHEMA_1_DEFAULTS["prompt_dropout"]
    assert not {"k", "t", "readout"} & set(record)


def test_a_record_of_schema_2_gets_new_names():
    record = migrate_record(SCHEMA_2)
    assert record["schema"] == 2 and record["shots"] is None and record["split_seed"] == 3
    assert record["stratified"] is True
    assert (record["prompt_length"], record["bottleneck"], record["init_from"]) == (5, 16, None)
    assert (record["parameter_sharing"], record["generator_input"]) == ("S", "layer0")
    assert record["insertion"] == "replace"
    assert record["learning_rates_tried"] == {"0.001": 79.0} and record["lr_at_grid_edge"] is False
    assert record["split_sizes"] == dict(train=100)
    assert record["measurements"] == dict(variance=0.5)
    assert record["standard_errors"] == {"measurements.variance": 0.1, "score": 0.2}
    assert record["provenance"] == dict(
        command="idp_compare",
        commit="abc",
        worktree_clean=True,
        started_at="2026-01-01T00:00:00Z",
    )
    assert not (set(RENAMED_OPTIONS) | set(RENAMED_RECORD_KEYS)) & set(record) - {"shots"}


def test_the_target_shots_of_a_transfer_are_not_the_shots_of_its_source():
    record = migrate_record(dict(method="lpt", seed=0, k=1000, shots=100, t=5))
    assert (record["shots"], record["target_shots"]) == (1000, 100)


@pytest.mark.parametrize(
    "method,inject,way,insertion",
    [
        ("m-idpg-phm", "add", None, None),
        ("m-idpg-phm", "insert", None, "insert"),
        ("m-idpg-phm", "kv", "replace", "kv"),
        ("p-tuning-v2", "add", None, None),
        ("p-tuning-v2", "add", "replace", "replace"),
        ("p-tuning-v2", "add", "add", "add"),
        ("lpt", "add", None, None),
    ],
)
def test_inject_and_way_become_the_insertion_of_their_method(method, inject, way, insertion):
    options = dict(method=method, inject=inject, way=way)
    assert migrate_options(options) == dict(method=method, insertion=insertion)
    reordered = dict(method=method, way=way, inject=inject)
    assert migrate_options(reordered) == dict(method=method, insertion=insertion)


def test_a_timing_keeps_all_but_the_prompt_length():
    assert migrate_record(TIMING) == {
        **{name: value for name, value in TIMING.items() if name != "t"},
        "prompt_length": 5,
    }


@pytest.mark.parametrize("record", [SCHEMA_1, SCHEMA_2, TIMING], ids=["1", "2", "timing"])
def test_a_migrated_record_is_returned_unchanged(record):
    migrated = migrate_record(record)
    assert migrate_record(migrated) is migrated


def test_records_are_migrated_when_they_are_read(tmp_path):
    file = tmp_path / "old.jsonl"
    file.write_text(dump_record(SCHEMA_1) + "\n" + json.dumps(TIMING) + "\n")
    before = file.read_bytes()
    first, second = read_records(file)
    assert first["prompt_length"] == 10 and second["prompt_length"] == 5
    assert file.read_bytes() == before


def test_a_saved_description_gets_new_names():
    task = dict(name="trec", labels=["a", "b"], words=["x", "y"], text=False, held_out=500)
    old = dict(
        format=2, cfg=dict(method="lpt", k=8, t=5, readout="cls", plain_draw=True), task=task
    )
    new = migrate_description(old)
    assert new["cfg"] == dict(
        method="lpt", shots=8, prompt_length=5, pooling="cls", stratified=False
    )
    assert new["task"] == dict(
        name="trec",
        labels=["a", "b"],
        label_words=["x", "y"],
        is_generation=False,
        max_validation_size=500,
    )
    assert migrate_description(new) == new
    assert old["task"] is task and "words" in task  # the argument is not changed


def test_every_new_task_field_is_a_field():
    from idp_tutorial.data.task import Task

    fields = set(getattr(Task, "__dataclass_fields__", None) or Task._fields)
    assert set(RENAMED_TASK_FIELDS.values()) <= fields
    assert migrate_task(dict(label_words=["x"])) == dict(label_words=["x"])


YAML = """# a run of version 0.2
method: lpt-npg
t: 5
k: 100          # few-shot
batch-size: 8
plain-draw: yes # at random
head-first: true
rates: [1e-3, 3e-3]
class_weight:
  t: 3
"""


def test_a_yaml_file_gets_new_names_and_keeps_comments(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    assert migrate_file(file)
    text = file.read_text()
    assert "# a run of version 0.2" in text and "# few-shot" in text and "# at random" in text
    assert yaml.load(text, yaml.BaseLoader) == {
        "method": "lpt-npg",
        "prompt_length": "5",
        "shots": "100",
        "batch-size": "8",
        "stratified": "no",
        "tune_head_first": "true",
        "learning_rates": ["1e-3", "3e-3"],
        "class_weight": {"t": "3"},  # the name of a class, not an option
    }
    assert not migrate_file(file) and file.read_text() == text


@pytest.mark.parametrize("word,inverse", [("true", "false"), ("off", "on"), ("False", "true")])
def test_the_inverted_option_has_the_opposite_value(word, inverse, tmp_path):
    file = tmp_path / "run.yml"
    file.write_text(f"plain_draw: {word}\n")
    migrate_file(file)
    assert file.read_text() == f"stratified: {inverse}\n"


def test_a_file_of_records_is_converted_once(tmp_path):
    file = tmp_path / "records.jsonl"
    present = dump_record(dict(method="lpt", seed=0, shots=5))
    file.write_text("\n".join([dump_record(SCHEMA_1), "", present, json.dumps(TIMING)]) + "\n")
    assert migrate_file(file)
    lines = file.read_text().splitlines()
    assert lines[1] == present and len(lines) == 3
    assert load_record(lines[0]) == migrate_record(SCHEMA_1)
    assert "digest" in json.loads(lines[2])
    before = file.read_bytes()
    assert not migrate_file(file) and file.read_bytes() == before


def test_a_damaged_line_is_refused_and_nothing_is_written(tmp_path, capsys):
    good = tmp_path / "a.jsonl"
    good.write_text(dump_record(SCHEMA_1) + "\n")
    bad = tmp_path / "b.jsonl"
    bad.write_text(
        dump_record(SCHEMA_1) + "\n" + dump_record(SCHEMA_2).replace("80.0", "90.0") + "\n"
    )
    before = good.read_bytes(), bad.read_bytes()
    with pytest.raises(ValueError, match=r"b.jsonl: line 2 is not a record \(its digest does not"):
        migrate_file(bad)
    assert main([str(tmp_path)]) == 2
    assert "line 2 is not a record" in capsys.readouterr().err
    bad.write_text('{"method": "lpt", "se')
    assert main([str(good), str(bad)]) == 2
    assert "line 1 is not a record" in capsys.readouterr().err
    assert (good.read_bytes(), bad.read_text()) == (before[0], '{"method": "lpt", "se')


def test_other_and_missing_files_are_refused(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("t\n")
    assert main([str(tmp_path / "a.csv")]) == 2
    assert "cannot be converted: give a .jsonl, .yaml or .yml file" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere.jsonl")]) == 2
    assert "nowhere.jsonl does not exist" in capsys.readouterr().err


def test_the_command_converts_the_records_below_a_folder(tmp_path):
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep/records.jsonl"
    file.write_text(json.dumps(SCHEMA_1) + "\n")
    command = [sys.executable, "-m", "idp_tutorial.utils.migration", str(tmp_path)]
    for outcome in ("converted", "nothing to convert"):
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (result.returncode, result.stdout) == (0, f"{file}: {outcome}\n"), result.stderr
    assert load_record(file.read_text())["prompt_length"] == 10


def test_the_results_of_the_repository_are_migrated():
    files = sorted((ROOT / "results").rglob("*.jsonl"))
    assert len(files) > 50
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            record = load_record(line)
            assert migrate_record(record) is record, file


def test_the_yaml_files_of_the_repository_have_present_names():
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        keys = yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader)
        assert not set(RENAMED_OPTIONS) & set(keys), file


def test_a_renamed_option_is_explained():
    assert explain_renamed_option("t") == "was renamed to --prompt_length in version 0.3"
    assert "use --no_stratified" in explain_renamed_option("plain_draw")
    assert explain_renamed_option("prompt_length") is None
