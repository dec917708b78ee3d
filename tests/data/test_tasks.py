"""The registry of tasks, and `load_task`: its splits, samples and messages."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from small import YES_NO, YES_NO_ROWS, config, sentences_of, write_splits
from superglue import groups_of

from idp_tutorial.data.rows import check_one_correct_candidate
from idp_tutorial.data.synthetic import SYNTHETIC_TASKS
from idp_tutorial.data.task import Task, TaskConfig
from idp_tutorial.data.tasks import TASKS, load_config_task, load_task
from idp_tutorial.runs.experiment import run_experiment

# ---- the registry


def test_registry_has_the_tasks_of_all_three_papers():
    papers = [
        "sst2",
        "mpqa",
        "mr",
        "cr",
        "subj",
        "trec",
        "mnli",
        "mrpc",
        "qnli",
        "qqp",
        "rte",
        "stsb",
        "cb",
        "copa",
        "multirc",
        "boolq",
        "wic",
        "imdb",
    ]
    assert set(TASKS) == {*papers, *SYNTHETIC_TASKS} and len(SYNTHETIC_TASKS) == 8
    assert all(t.hub_dataset and t.name == name for name, t in TASKS.items())
    assert all("/" in TASKS[n].hub_dataset[0] for n in papers)


@pytest.mark.parametrize(
    "name,words",
    [
        ("sst2", dict(negative="terrible", positive="great")),
        ("subj", dict(subjective="subjective", objective="objective")),
        (
            "trec",
            dict(
                abbreviation="Expression",
                entity="Entity",
                description="Description",
                human="Human",
                location="Location",
                numeric="Number",
            ),
        ),
        ("mnli", dict(entailment="Yes", neutral="Maybe", contradiction="No")),
        ("rte", dict(entailment="Yes", not_entailment="No")),
        ("qqp", dict(not_duplicate="No", duplicate="Yes")),
    ],
)
def test_label_words_in_index_order(name, words):
    assert dict(zip(TASKS[name].labels, TASKS[name].label_words)) == words and list(words) == list(
        TASKS[name].labels
    )


# ---- splits


def test_user_defined_task_from_a_folder(tmp_path):
    write_splits(tmp_path / "mine", train=YES_NO_ROWS, test=YES_NO_ROWS[:7])
    t = load_task(YES_NO, tmp_path)
    assert (
        t.split_sizes() == dict(train=54, validation=6, test=7)
        and t.splits["test"] == YES_NO_ROWS[:7]
    )
    assert not sentences_of(t.splits["train"]) & sentences_of(t.splits["validation"])
    assert Counter(r["label"] for r in t.splits["validation"]) == {0: 3, 1: 3}
    assert (
        load_task(YES_NO, tmp_path).splits
        == t.splits
        != load_task(YES_NO, tmp_path, split_seed=1).splits
    )
    assert (
        load_task(YES_NO, tmp_path, split_seed=1).splits["test"] == t.splits["test"]
        and YES_NO.splits == {}
    )


def test_the_reported_split_never_selects(tmp_path):
    train, val, test = [
        [dict(r, sentence1=s + r["sentence1"]) for r in YES_NO_ROWS]
        for s in ("train ", "validation ", "test ")
    ]

    def origin(t):
        return {s: {r["sentence1"].split()[0] for r in rows} for s, rows in t.splits.items()}

    write_splits(tmp_path / "a/mine", train=train, validation=val, test=test)
    write_splits(tmp_path / "b/mine", train=train, validation=val)
    assert origin(load_task(YES_NO, tmp_path / "a")) == dict(
        train={"train"}, validation={"validation"}, test={"test"}
    )
    assert origin(load_task(YES_NO, tmp_path / "b")) == dict(
        train={"train"}, validation={"train"}, test={"validation"}
    )
    for d, reported in (("a", "test"), ("b", "validation")):
        t = load_task(YES_NO, tmp_path / d, shots=10)
        assert origin(t) == dict(train={"train"}, validation={"train"}, test={reported})
        assert t.split_sizes() == dict(train=10, validation=50, test=60)


def test_loading_keeps_candidates_together(superglue_folder):
    task = load_task("copa", superglue_folder)
    few_shot = load_task("copa", superglue_folder, shots=5)
    assert task.split_sizes() == dict(
        train=54, validation=6, test=24
    ) and few_shot.split_sizes() == dict(train=10, validation=50, test=24)
    for t in (task, few_shot):
        for rows in t.splits.values():
            check_one_correct_candidate(rows, "here")
        assert not {*groups_of(t.splits["train"])} & {*groups_of(t.splits["validation"])}
    with pytest.raises(
        ValueError,
        match="shots must be between 1 and 29 for a training split of 30 questions",
    ):
        load_task("copa", superglue_folder, shots=30)


def test_unknown_tasks_and_invalid_shots():
    with pytest.raises(
        ValueError, match="unknown task 'sst-2': did you mean 'sst2'. Known: sst2, .*domains"
    ):
        load_task("sst-2")
    with pytest.raises(ValueError, match="unknown task 'xyzzy'. Known: sst2"):
        load_task("xyzzy")
    with pytest.raises(ValueError, match="shots must be at least 1, got 0 .shots=None uses all"):
        load_task("sentiment", shots=0)
    with pytest.raises(
        ValueError, match="shots must be between 1 and 1999 for a training split of 2000 rows"
    ):
        load_task("sentiment", shots=5000)


# ---- bundled tasks


@pytest.mark.parametrize("name", [n for n in SYNTHETIC_TASKS if not TASKS[n].is_generation])
def test_bundled_tasks_load_and_fit_their_record(name, bpe):
    t = load_task(name)
    assert set(t.splits) == {"train", "validation", "test"} and all(
        len(r) >= 200 for r in t.splits.values()
    )
    assert all(("sentence2" in r) == t.pair for r in t.splits["train"])
    if not t.is_regression:
        assert {r["label"] for r in t.splits["train"]} == set(range(len(t.labels)))
    e = t.encode(t.splits["test"][:20], bpe, 128, "code")
    assert all(o["input_ids"][o["mask_position"]] == bpe.mask_token_id for o in e)
    few_shot = load_task(name, shots=100)
    assert few_shot.split_sizes() == dict(train=100, validation=1000, test=len(t.splits["test"]))
    assert few_shot.splits["test"] == t.splits["test"]


def test_rows_of_a_generation_task_have_a_target(tmp_path):
    t = load_task("in-short", shots=20)
    assert len(t.splits["train"]) == 20 and all(
        set(r) == {"sentence1", "target"} for r in t.splits["train"]
    )
    mine = Task("mine", is_generation=True, metric="exact_match")
    (tmp_path / "mine").mkdir()
    rows = [dict(sentence1=f"said {i}", target=f"t {i}") for i in range(4)]
    write_splits(tmp_path / "mine", train=rows, validation=rows[:2], test=rows)
    assert load_task(mine, tmp_path).splits["test"][1] == rows[1]
    write_splits(
        tmp_path / "mine",
        test=[dict(sentence1="one", target="two"), dict(sentence1="one", label=0)],
    )
    with pytest.raises(
        ValueError, match="no target among sentence1, label. Task 'mine' needs sentence1, target"
    ):
        load_task(mine, tmp_path)
    with pytest.raises(ValueError, match="is_generation=True takes no labels"):
        Task("mine", labels=("a", "b"), is_generation=True)


# ---- the published data sets


@pytest.mark.parametrize(
    "name,n",
    [
        ("mr", (7662, 1000, 2000)),
        ("subj", (7000, 1000, 2000)),
        ("trec", (4952, 500, 500)),
        ("cr", (1598, 177, 2000)),
        ("rte", (2241, 249, 277)),
        ("stsb", (5175, 574, 1500)),
    ],
)
def test_real_sizes_are_lpts_where_lpt_has_them(name, n, data_dir):
    assert tuple(load_task(name, data_dir).split_sizes().values()) == n


def test_real_few_shot_sets_are_taken_as_they_are(data_dir):
    t = load_task("cr", data_dir, shots=100)
    # IDPG's frozen draw
    assert t.split_sizes() == dict(train=100, validation=1000, test=2000)
    assert Counter(r["label"] for r in t.splits["train"])[1] == 79
    assert load_task("qqp", data_dir, shots=100).split_sizes() == dict(
        train=100, validation=1000, test=40430
    )


# ---- a run


def test_a_run_on_multirc_reports_the_mean_of_both_metrics(superglue_folder, small_folder):
    r = run_experiment(
        config(
            method="lpt",
            task="multirc",
            backbone=str(small_folder),
            data=str(superglue_folder),
            max_len=48,
        )
    )
    assert r["metric"] == "f1+exact" and r["score"] == pytest.approx(
        (r["scores"]["f1"] + r["scores"]["exact"]) / 2
    )
    json.dumps(r)


def test_the_task_of_a_config_has_its_sample():
    cfg = TaskConfig(task="sentiment", shots=8, split_seed=3, stratified=False)
    task = load_config_task(cfg)
    assert task.digest() == load_task("sentiment", None, 8, 3, False).digest()
    others = (dict(shots=9), dict(split_seed=2), dict(stratified=True))
    assert all(load_config_task(replace(cfg, **o)).digest() != task.digest() for o in others)
