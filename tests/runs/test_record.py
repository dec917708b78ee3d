"""Records: their fields, how they are written and read, and digests of what a run read.

The store of runs: what counts as the same run, and what is run again.
"""

import json
import shutil
from dataclasses import replace

import pandas as pd
import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from small import config, small_task

from idp_tutorial.assembly.build import load_config_backbone
from idp_tutorial.core.backbone import backbone_id
from idp_tutorial.data.splits import load_splits_from_folder
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.data.user_data import load_table_task
from idp_tutorial.runs import record as run_records
from idp_tutorial.runs.experiment import Experiment, train_and_save
from idp_tutorial.runs.record import (
    RunStore,
    backbone_digest,
    build_record,
    format_summary_line,
    make_fingerprint,
)
from idp_tutorial.utils.digests import MANIFEST_NAME
from idp_tutorial.utils.records import SCHEMA_VERSION, append_record, read_records

DIGESTS = dict(weights="a" * 16, data="b" * 16)
SIZES = dict(train=4, validation=2, test=2)


def make(**values):
    return build_record(config(), DIGESTS, SIZES, 0.0, **values)


def test_a_record_has_the_config_and_further_fields():
    record = make(metric="accuracy", score=70.0, figure="lpt-f6")
    line = json.loads(json.dumps(record))
    assert (line["schema"], line["status"], line["seed"]) == (SCHEMA_VERSION, "done", 0)
    assert [*line][:3] == ["schema", "status", "method"] and [*line][-1] == "figure"


def test_fields_of_the_config_can_be_replaced():
    record = make(layer=3, lr=0.5)
    assert (record["layer"], record["lr"]) == (3, 0.5)


def test_a_field_without_a_value_is_left_out():
    assert {"score", "message", "params"}.isdisjoint(make())


def test_the_summary_line_has_the_learning_rate_and_the_score():
    finished = make(metric="accuracy", score=70.0, lr=1e-2)
    diverged = make(status="diverged", message="the loss is nan", lr=1e-2)
    assert format_summary_line(finished) == "lr 1.0e-02  accuracy 70.0"
    assert format_summary_line(diverged) == "lr 1.0e-02  diverged: the loss is nan"
    assert (finished["status"], diverged["status"]) == ("done", "diverged")


def test_a_finished_and_a_diverged_run_have_the_same_digests(small_folder):
    task = small_task()
    experiment = Experiment(config(backbone=str(small_folder), steps=1, eval_every=1), task)
    model, record = experiment.train()
    assert model is not None and record["digests"] == experiment.record_divergence("nan")["digests"]
    assert record["digests"]["data"] == task.digest()
    untested = experiment.record_divergence("nan", score_test=False)
    assert untested["digests"]["data"] == task.digest(include_test=False)


def run_and_count(store, fingerprint, calls):
    def run():
        calls.append(1)
        score = 70.0 + len(calls)
        return dict(schema=SCHEMA_VERSION, status="done", metric="accuracy", score=score)

    return store.get_or_run(fingerprint, run)


def test_a_stored_run_is_not_run_again(tmp_path):
    calls = []
    file = tmp_path / "r.jsonl"
    fingerprint = make_fingerprint(config(), DIGESTS, class_weights=(1, 2))
    first = run_and_count(RunStore(file), fingerprint, calls)
    assert run_and_count(RunStore(file), fingerprint, calls) == first
    assert len(calls) == 1 == len(file.read_text().splitlines())


@pytest.mark.parametrize(
    "change",
    [
        dict(cfg=dict(seed=1)),
        dict(cfg=dict(lr=0.5)),
        dict(cfg=dict(prompt_length=5)),
        dict(digests=dict(DIGESTS, data="c" * 16)),
        dict(digests=dict(DIGESTS, weights="c" * 16)),
        dict(digests=dict(DIGESTS, glove="c" * 16)),
        dict(conditions=dict(lr_selection="default")),
    ],
    ids=str,
)
def test_another_setting_or_input_is_another_run(change):
    calls = []
    store = RunStore(None)
    for cfg, digests, conditions in (
        ({}, DIGESTS, dict(lr_selection="given")),
        (
            change.get("cfg", {}),
            change.get("digests", DIGESTS),
            change.get("conditions", dict(lr_selection="given")),
        ),
    ):
        run_and_count(store, make_fingerprint(config(**cfg), digests, **conditions), calls)
    assert len(calls) == 2


def test_the_device_and_the_folders_of_files_do_not_matter(tmp_path):
    fingerprints = [
        make_fingerprint(config(data=data, glove=glove, device=device, cache_dir=data), DIGESTS)
        for data, glove, device in (("a", "a/glove.txt", "cpu"), ("b", "b/words.txt", "auto"))
    ]
    assert fingerprints[0] == fingerprints[1]


def test_a_search_is_found_with_any_learning_rate():
    store = RunStore(None)
    cfg = config(lr=None)
    record = store.get_or_run(make_fingerprint(cfg, DIGESTS), lambda: dict(lr=0.3))
    assert store.find(make_fingerprint(cfg, DIGESTS)) == record
    assert store.find(make_fingerprint(replace(cfg, lr=0.3), DIGESTS)) == record
    assert store.find(make_fingerprint(replace(cfg, lr=0.1), DIGESTS)) is None


def test_a_record_that_lacks_a_field_is_not_the_result():
    store = RunStore(None)
    fingerprint = make_fingerprint(config(), DIGESTS)
    store.add({name: value for name, value in fingerprint.items() if name != "digests"})
    assert store.find(fingerprint) is None


def test_a_control_does_not_depend_on_the_number_of_steps():
    one, two = [make_fingerprint(config(method="probe", steps=n), DIGESTS) for n in (3, 9)]
    assert one == two


def test_earlier_records_are_found_but_not_written(tmp_path):
    calls = []
    earlier = RunStore(None)
    fingerprint = make_fingerprint(config(), DIGESTS)
    run_and_count(earlier, fingerprint, calls)
    store = RunStore(tmp_path / "r.jsonl", earlier.records)
    run_and_count(store, fingerprint, calls)
    assert len(calls) == 1 and not (tmp_path / "r.jsonl").exists()


RUN = dict(method="lpt", seed=0, schema=SCHEMA_VERSION, status="done", task="a", backbone="b")


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(schema=2), "its schema is 2, and this version reads schema"),
        (dict(status="diverged"), "it is of a run that diverged, and has no message"),
        (dict(lr_selection="given"), "it says how its lr was chosen, and has no lr"),
    ],
)
def test_an_incomplete_record_of_a_run_is_refused(tmp_path, change, message):
    file = tmp_path / "r.jsonl"
    append_record(RUN, file)
    assert RunStore(file).records == [RUN]
    append_record({**RUN, **change}, file)
    with pytest.raises(ValueError, match=f"line 2 .*{message}"):
        RunStore(file)


# --- data: texts and labels count, places do not


def write_rows(folder, name, rows, blank_lines=0):
    folder.mkdir(exist_ok=True, parents=True)
    lines = ["text,label", *[f"{text},{label}" for text, label in rows]]
    (folder / name).write_text("\n".join(lines) + "\n" * (1 + blank_lines))
    return folder / name


def test_the_digest_of_a_table_does_not_depend_on_its_place(tmp_path, monkeypatch):
    rows = [(f"text {i} is {'good' if i % 2 else 'bad'}", "ab"[i % 2]) for i in range(40)]
    write_rows(tmp_path, "t.csv", rows)
    write_rows(tmp_path / "copy", "t.csv", rows)
    write_rows(tmp_path / "blank", "t.csv", rows, blank_lines=1)
    pd.DataFrame(rows, columns=["text", "label"]).to_parquet(tmp_path / "t.parquet")
    monkeypatch.chdir(tmp_path)
    names = ("t.csv", "./t.csv", tmp_path / "t.csv", "copy/t.csv", "blank/t.csv", "t.parquet")
    tasks = [load_table_task(str(name))[0] for name in names]
    assert len({(task.name, task.digest()) for task in tasks}) == 1
    changed = [*rows[:-1], (rows[-1][0], "a")]
    other, _ = load_table_task(str(write_rows(tmp_path / "other", "t.csv", changed)))
    assert other.digest() != tasks[0].digest()


def test_the_digest_does_not_depend_on_the_lines_of_grouped_rows(tmp_path):
    """COPA's rows are grouped by line number, which an empty line shifts."""
    questions = [
        dict(premise=f"It rained {i}.", choice1="Wet.", choice2="Dry.", question="effect", label=0)
        for i in range(4)
    ]
    digests = set()
    for separator in ("\n", "\n\n"):
        folder = tmp_path / str(len(separator)) / "copa"
        folder.mkdir(parents=True)
        for split in ("train", "val", "test"):
            lines = separator.join(json.dumps(question) for question in questions)
            (folder / f"{split}.jsonl").write_text(lines + "\n")
        splits, _ = load_splits_from_folder(TASKS["copa"], folder.parent)
        digests.add(replace(TASKS["copa"], splits=splits).digest())
    assert len(digests) == 1


def test_the_digest_has_labels_groups_and_the_definition_of_the_task():
    task = small_task()
    rows = task.splits["test"]
    others = [
        replace(task, labels=("no", "yes")),
        replace(task, metric="f1"),
        replace(task, splits={**task.splits, "test": rows[::-1]}),
        replace(task, splits={**task.splits, "test": [{**row, "group": 1} for row in rows]}),
    ]
    assert len({t.digest() for t in (task, *others)}) == 5
    assert {replace(task, name="other").digest(), task.digest()} == {task.digest()}
    assert len({t.digest(include_test=False) for t in (task, others[2], others[3])}) == 1


@pytest.fixture
def loads(monkeypatch):
    """The configs whose backbones are loaded for their digests."""
    configs = []
    load = run_records.load_config_backbone
    monkeypatch.setattr(
        run_records, "load_config_backbone", lambda cfg: configs.append(cfg) or load(cfg)
    )
    monkeypatch.setattr(run_records, "_BACKBONE_DIGESTS", {})
    return configs


def test_a_backbone_is_loaded_for_its_digest_only_if_its_files_are_new(
    small_folder, tmp_path, loads
):
    folder = tmp_path / "backbone"
    shutil.copytree(small_folder, folder)
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    cfg = config(backbone=str(folder))
    first = backbone_digest(cfg)
    for other in (cfg, replace(cfg, seed=1, batch_size=4)):
        assert backbone_digest(other) == first
    assert len(loads) == 1 and first == backbone_id(load_config_backbone(cfg))
    assert backbone_digest(replace(cfg, dtype="bfloat16")) != first and len(loads) == 2
    file = folder / "model.safetensors"
    weights = bytearray(file.read_bytes())
    weights[-1] ^= 128  # the sign of the last weight, so the size is the same
    file.write_bytes(weights)
    assert backbone_digest(cfg) != first and len(loads) == 3
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    last = backbone_digest(cfg)
    assert len(loads) == 4 and backbone_digest(cfg) == last
    assert len(loads) == 4 and last == backbone_id(load_config_backbone(cfg))


def test_the_digest_of_a_branch_is_not_kept(small_folder, tmp_path, loads, monkeypatch):
    """Another call may load another commit."""
    cache = tmp_path / "hub"
    repo = cache / "models--me--mine"
    (repo / "refs").mkdir(parents=True)
    commits = ["a" * 40, "b" * 40]
    for commit in commits:
        shutil.copytree(small_folder, repo / "snapshots" / commit)
    file = repo / "snapshots" / commits[1] / "model.safetensors"
    tensors = load_file(file)
    next(t for name, t in tensors.items() if "word_embeddings" in name).add_(1.0)
    save_file(tensors, file, {"format": "pt"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    digests = []
    for commit in commits:
        (repo / "refs/main").write_text(commit)
        digests.append(backbone_digest(config(backbone="me/mine")))
    assert len(loads) == 2 and digests[0] != digests[1]
    for _ in range(2):
        pinned = [backbone_digest(config(backbone=f"me/mine@{commit}")) for commit in commits]
        assert pinned == digests and len(loads) == 4


def test_the_digest_of_a_backbone_without_files_is_not_kept(small_folder, loads, monkeypatch):
    monkeypatch.setattr(run_records, "list_backbone_files", lambda name: [])
    cfg = config(backbone=str(small_folder))
    assert backbone_digest(cfg) == backbone_digest(cfg) and len(loads) == 2
    assert not run_records._BACKBONE_DIGESTS


# --- a folder of one run


@pytest.fixture
def cfg(small_folder):
    return config(backbone=str(small_folder), steps=2, eval_every=2)


def test_a_run_whose_record_was_not_written_is_completed(cfg, tmp_path):
    """A kill between the renames of the model and of the record leaves the model alone."""
    record = train_and_save(cfg, tmp_path, small_task())
    before = (tmp_path / "prompts.safetensors").read_bytes()
    (tmp_path / "record.jsonl").unlink()
    again = train_and_save(cfg, tmp_path, small_task())
    assert (again["score"], again["history"]) == (
        record["score"],
        [tuple(point) for point in record["history"]],
    )
    assert [r["score"] for r in read_records(tmp_path / "record.jsonl")] == [record["score"]]
    assert (tmp_path / "prompts.safetensors").read_bytes() == before


def test_a_model_without_its_record_is_not_replaced_by_another_run(cfg, tmp_path):
    train_and_save(cfg, tmp_path, small_task(), save_every=0)
    (tmp_path / "record.jsonl").unlink()
    for other, task, words in (
        (replace(cfg, seed=1), small_task(), "seed was 0 and is now 1"),
        (cfg, small_task(train=60), "data was '"),
    ):
        with pytest.raises(ValueError, match=f"holds another run .{words}"):
            train_and_save(other, tmp_path, task, save_every=0)
