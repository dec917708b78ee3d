"""Transfer: label maps, renamed heads, the data and initial state of each stage, and records."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from small import Killed, batch_of, config, refused, same, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.statistics import (
    estimate_contrast,
    has_per_example_results,
    per_example_scores,
)
from idp_tutorial.training.fit import TrainingRun, TrainLog, fit
from idp_tutorial.utils.checks import MissingFileError
from idp_tutorial.utils.records import SCHEMA_VERSION, read_records
from results.transfer import scores as T


def task(name, labels, words=(), **kw):
    return Task(name, labels=labels, label_words=words, **kw)


# --- label maps


@pytest.mark.parametrize(
    "a,b,want",
    [
        ("qqp", "mrpc", (0, 1)),
        ("mrpc", "qqp", (0, 1)),
        ("sst2", "imdb", (0, 1)),
        ("imdb", "sst2", (0, 1)),
        ("sentiment", "two-domains", (0, 1)),
        ("rte", "mrpc", (1, 0)),
        ("mnli", "cb", (0, 2, 1)),
        ("cb", "mnli", (0, 2, 1)),
        ("stsb", "similarity", None),
        ("questions", "trec", tuple(range(6))),
    ],
)
def test_labels_that_correspond(a, b, want):
    assert T.make_label_map(TASKS[a], TASKS[b]) == want


def test_labels_without_words_are_matched_by_name():
    a = task("a", ("x", "y", "z"))
    b = task("b", ("z", "x", "y"), ("1", "2", "3"))
    assert T.make_label_map(a, b) == (1, 2, 0) and T.make_label_map(b, a) == (2, 0, 1)


MERGE = dict(entailment="entailment", neutral="not_entailment", contradiction="not_entailment")


def test_an_explicit_map_is_used():
    assert T.make_label_map(TASKS["mnli"], TASKS["rte"], MERGE) == (0, 1, 1)
    # it overrules the words
    assert T.make_label_map(
        TASKS["sst2"], TASKS["imdb"], dict(negative="positive", positive="negative")
    ) == (1, 0)


@pytest.mark.parametrize(
    "a,b,given,words",
    [
        (
            "mnli",
            "rte",
            None,
            [
                "'mnli' (entailment: Yes, neutral: Maybe",
                "'rte'",
                "do not correspond",
                "Give a label map",
            ],
        ),
        ("sst2", "subj", None, ["do not correspond"]),
        ("qqp", "stsb", None, ["from 'qqp' to 'stsb' needs two tasks with classes"]),
        ("in-short", "qqp", None, ["needs two tasks with classes"]),
        ("stsb", "similarity", dict(a="b"), ["two regression tasks need no map"]),
        ("mnli", "rte", {**MERGE, "maybe": "entailment"}, ["each label of 'mnli'", "a key"]),
        ("mnli", "rte", {k: MERGE[k] for k in ("entailment", "neutral")}, ["each label of 'mnli'"]),
        ("mnli", "rte", {**MERGE, "neutral": "unsure"}, ["each label of 'rte'", "a value"]),
        ("mnli", "rte", {k: "entailment" for k in MERGE}, ["each label of 'rte'"]),
    ],
)
def test_labels_that_do_not_correspond(a, b, given, words):
    refused(lambda: T.make_label_map(TASKS[a], TASKS[b], given), *words)


def test_names_and_words_that_disagree():
    with pytest.raises(
        ValueError, match="have two maps, one by their names and another by their words"
    ):
        T.make_label_map(
            task("a", ("no", "yes"), ("No", "Yes")), task("b", ("no", "yes"), ("Yes", "No"))
        )


# --- heads


def test_probabilities_add_up(bbs):
    bb = bbs("roberta")
    model = PlannedModel(bb, ClassificationHead(bb.d, 4, "mean")).eval()
    batch = batch_of(bb)
    p = model(batch).softmax(1)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    model.head = T.LabelMapHead(model.head, (2, 0, 2, 1))
    want = torch.stack([p[:, 1], p[:, 3], p[:, 0] + p[:, 2]], 1)
    same(model(batch).softmax(1), want)
    same(model.loss({**batch, "label": y}), -want[range(6), y].log().mean())


@pytest.mark.parametrize("loss_vocab", ["full", "labels"])
def test_renamed_classes_keep_the_heads_own_loss(bbs, loss_vocab):
    bb = bbs("roberta")
    a = small_task()
    model = PlannedModel(bb, VerbalizerHead(bb, a.word_ids(bb.tokenizer), loss_vocab)).eval()
    batch = batch_of(bb, template="code")
    logits = model(batch)
    loss = model.loss(batch)
    model.head = T.LabelMapHead(model.head, (1, 0))
    same(model(batch), logits.flip(1), 0)
    same(model.loss({**batch, "label": 1 - batch["label"]}), loss)
    assert (model.loss(batch) - loss).abs() > 1e-3


def test_the_same_labels_change_nothing():
    assert not any(map(T.changes_class_indices, (None, (0, 1)))) and T.changes_class_indices((1, 0))


# --- one run


def flipped(t, name="flipped"):
    """Return the task with its two labels exchanged."""
    return replace(
        t,
        name=name,
        labels=t.labels[::-1],
        label_words=t.label_words[::-1],
        splits={s: [{**r, "label": 1 - r["label"]} for r in rows] for s, rows in t.splits.items()},
    )


@pytest.mark.parametrize(
    "kw",
    [
        dict(),
        dict(head="verbalizer"),
        dict(method="fine-tuning"),
        dict(method="head-only", head="verbalizer"),
    ],
    ids=lambda k: " ".join(k.values()) or "lpt-npg",
)
def test_a_task_transfers_to_itself(small_folder, kw):
    """Also where the two labels are exchanged: the scores are equal."""
    a = small_task()
    cfg = config(backbone=str(small_folder), **kw)
    (same_task,), (turned,) = (
        T.run_transfer(cfg, a, replace(a, name="again"), few_shot=False),
        T.run_transfer(cfg, a, flipped(a), few_shot=False),
    )
    assert (
        same_task["score"] == same_task["source_score"] == turned["score"]
        and turned["label_map"] == [1, 0]
        and same_task["scores"]["accuracy"] == turned["scores"]["accuracy"]
    )


def test_the_data_and_the_initial_state_of_each_stage(small_folder, monkeypatch):
    a = small_task()
    b = flipped(small_task("two-domains", 16))
    cfg = config(backbone=str(small_folder))
    seen = []

    def spy(model, t, c, checkpoint_dir=None):
        before = {n: p.detach().clone() for n, p in model.trained_parameters().items()}
        log = fit(model, t, c)
        seen.append(
            (
                t.name,
                c.task,
                c.lr,
                before,
                {n: p.detach().clone() for n, p in model.trained_parameters().items()},
                log.validation,
            )
        )
        return log

    monkeypatch.setattr(T, "fit", spy)
    out = T.run_transfer(cfg, a, b, learning_rates=(1e-3, 1e-2))
    assert [(n, k, lr) for n, k, lr, *_ in seen] == [
        ("sentiment", "sentiment", 1e-2),
        *[("flipped", "flipped", lr) for lr in (1e-3, 1e-2)] * 2,
    ]

    def equal(x, y):
        return all(torch.equal(p, q) for p, q in zip(x.values(), y.values()))

    source, *few_shot = seen[:3]
    # both learning rates continue from the first task
    assert all(equal(f[3], source[4]) for f in few_shot)
    assert not equal(few_shot[0][4], few_shot[0][3])
    fresh = build_model(cfg, load_backbone(cfg.backbone), b).trained_parameters()
    assert all(equal(s[3], fresh) for s in seen[3:])  # alone: from the start
    assert (
        [r["setting"] for r in out] == ["zero-shot", "few-shot", "alone"]
        and [r["target_train_size"] for r in out] == [0, 16, 16]
        and out[0]["stage_learning_rate"] == 1e-2
    )
    for r, tried in zip(out[1:], (seen[1:3], seen[3:])):
        best_score = max(t[-1] for t in tried)
        assert r["validation"] == best_score
        assert r["stage_learning_rate"] in [t[2] for t in tried if t[-1] == best_score]
    assert [r["checkpoint_selection"].split()[-1] for r in out] == [
        "sentiment",
        "flipped",
        "flipped",
    ]
    json.dumps(out)
    assert (
        out[0]["backbone"] == small_folder.name and out[0]["split_sizes"]["flipped"]["test"] == 24
    )


def test_zero_shot_sees_nothing_of_the_target(small_folder):
    a = small_task()
    b = small_task("domains")
    cfg = config(backbone=str(small_folder))
    junk = {
        s: [{**r, "label": 0, "sentence1": "x"} for r in b.splits[s]]
        for s in ("train", "validation")
    }
    x, y = [
        T.run_transfer(cfg, a, t, few_shot=False)[0]
        for t in (b, replace(b, splits={**b.splits, **junk}))
    ]
    assert x["scores"] == y["scores"] and x["source_score"] == y["source_score"]


def test_the_state_of_the_best_learning_rate_is_restored(bbs, monkeypatch):
    a = small_task()
    cfg = config()
    model = build_model(cfg, bbs("roberta"), a)
    model.register_buffer("count", torch.zeros(1))
    start = model.sources[0].up.bias.detach().clone()

    def fake(m, t, c, checkpoint_dir=None):
        assert (
            torch.equal(m.sources[0].up.bias, start) and m.count == 0
        )  # every learning rate starts from the same state
        if c.lr == 9.0:
            raise FloatingPointError("nan")
        with torch.no_grad():
            m.sources[0].up.bias.add_(c.lr)
            m.count += 1
        return TrainLog({1.0: 50.0, 2.0: 70.0, 3.0: 70.0}[c.lr])

    monkeypatch.setattr(T, "fit", fake)
    log, lr = T._train_with_best_learning_rate(model, a, cfg, (1.0, 9.0, 2.0, 3.0))
    assert (log.validation, lr) == (70.0, 2.0) and model.count == 1
    same(model.sources[0].up.bias, start + 2)
    start = model.sources[0].up.bias.detach().clone()
    model.count.zero_()
    with pytest.raises(
        FloatingPointError, match=r"diverged on 'sentiment' with every learning rate of \[9.0\]"
    ):
        T._train_with_best_learning_rate(model, a, cfg, [9.0])


def _named(t, **kw):
    return replace(t, name="other", **kw)


LONG = "word " * 300
REFUSED = {
    "efl, labels the other way round": (
        dict(method="efl"),
        flipped,
        "'efl' has no head whose classes could be renamed, as 'sentiment' and 'flipped' require",
    ),
    "no template": (
        dict(head="verbalizer"),
        lambda a: _named(a, templates={}),
        "task 'other' has no template 'code'",
    ),
    "no label words": (
        dict(head="verbalizer"),
        lambda a: _named(a, label_words=()),
        "task 'other' has no label words",
    ),
    "no room for its longest text": (
        dict(method="prompt-tuning", max_len=300),
        lambda a: _named(
            a,
            splits={
                **a.splits,
                "validation": [*a.splits["validation"], dict(sentence1=LONG, label=0)],
            },
        ),
        "the longest example has 256 tokens",
    ),
}


@pytest.mark.parametrize("kw,other,words", REFUSED.values(), ids=REFUSED)
def test_errors_of_a_later_stage_are_raised_before_the_first(kw, other, words, monkeypatch):
    monkeypatch.setattr(T, "fit", lambda *a: pytest.fail("a task was trained"))
    a = small_task()
    with pytest.raises(ValueError, match=words):
        T.run_transfer(config(**kw), a, other(a))


@pytest.mark.parametrize(
    "kw,other,words",
    [
        (dict(), flipped, "could be renamed"),
        (dict(head="verbalizer"), lambda a: _named(a), "has its own entailment head"),
    ],
    ids=["renamed", "verbalizer"],
)
def test_nothing_is_trained_if_one_method_is_refused(kw, other, words, monkeypatch):
    monkeypatch.setattr(T, "fit", lambda *a: pytest.fail("a task was trained"))
    a = small_task()
    b = other(a)
    with pytest.raises(ValueError, match=words):
        T.compare_transfer(
            ["head-only", "lpt", "efl"],
            config(method="lpt", **kw),
            b.name,
            target_shots=0,
            seeds=1,
            loaded_tasks=(a, b),
        )


def test_label_words_of_the_target_are_only_needed_to_train_on_it(small_folder):
    a = small_task()
    b = _named(a, label_words=())
    assert (
        T.run_transfer(config(backbone=str(small_folder), head="verbalizer"), a, b, few_shot=False)[
            0
        ]["setting"]
        == "zero-shot"
    )
    # a pair is asked as it stands, with a head that can be renamed
    assert T.resolve_label_map(config(method="efl"), TASKS["rte"], TASKS["mrpc"]) == (1, 0)


def test_headline_and_majority_scores():
    t = small_task()
    y = [0, 0, 0, 1]
    p = [0, 0, 1, 1]
    assert T.compute_headline_score(t, t.score(p, y)) == pytest.approx(
        (75 + 100 * (4 / 5 + 2 / 3) / 2) / 2
    )
    scores = TASKS["stsb"].score([1.0, 2.0, 3.0], [1.0, 2.0, 4.0])
    assert T.compute_headline_score(TASKS["stsb"], scores) == scores["pearson+spearman"]
    majority = T.compute_majority_score(replace(t, splits=dict(test=[dict(label=v) for v in y])))
    assert majority == pytest.approx((75 + 100 * (6 / 7) / 2) / 2)


def test_the_majority_of_mrpc_beats_published_prompt_tuning(data_dir):
    mrpc = load_task("mrpc", data_dir, shots=100)
    assert len(mrpc.splits["train"]) == 100 and T.compute_majority_score(mrpc) == pytest.approx(
        54.5, abs=0.05
    )
    published = T.published_transfer_table().loc["prompt-tuning", ("qqp → mrpc", "zero-shot")]
    assert published < T.compute_majority_score(mrpc)


# --- many runs


@pytest.fixture
def runs(small_folder, tmp_path, messages):
    tasks = small_task(), flipped(small_task("two-domains", 16))

    def go(methods=("lpt", "head-only"), seeds=2, **kw):
        messages.clear()
        return T.compare_transfer(
            list(methods),
            config(backbone=str(small_folder), method="lpt", **kw.pop("cfg", {})),
            "flipped",
            seeds=seeds,
            records_file=tmp_path / "new" / "t.jsonl",
            loaded_tasks=tasks,
            **kw,
        )

    return go, messages, tmp_path / "new" / "t.jsonl"


@pytest.mark.long
def test_recorded_runs_are_not_repeated(runs, monkeypatch):
    go, messages, file = runs
    first = go()
    assert len(first) == 2 * 2 * 3 == len(messages) == len(file.read_text().splitlines())
    assert [(r["method"], r["seed"], r["setting"]) for r in first][:4] == [
        ("lpt", 0, "zero-shot"),
        ("lpt", 0, "few-shot"),
        ("lpt", 0, "alone"),
        ("lpt", 1, "zero-shot"),
    ] and {r["lr_selection"] for r in first} == {"given"}
    file.write_text(file.read_text() + '{"half a')
    again = go(seeds=3)
    assert (
        len(again) == 18 and len(messages) == 6 and len(file.read_text().splitlines()) == 18
    )  # one more seed only
    monkeypatch.setattr(T, "run_transfer", lambda *a: 1 / 0)
    assert json.loads(json.dumps(first)) == [r for r in go(seeds=3) if r["seed"] < 2]
    assert not messages
    for other in (
        dict(target_shots=0),
        dict(test_rows=20),
        dict(explicit_map=dict(negative="positive", positive="negative")),
        dict(cfg=dict(prompt_length=5)),
        dict(cfg=dict(lr=2e-2)),
    ):
        with pytest.raises(ZeroDivisionError):
            go(**other)  # another config is another run


def test_test_rows_of_one_class_are_refused(runs):
    go, *_ = runs
    with pytest.raises(
        ValueError,
        match="the first 1 test rows of 'sentiment' have no example of class "
        "'(posi|nega)tive': shuffle the file",
    ):
        go(test_rows=1)


def test_zero_shot_needs_no_training_examples_of_the_target(small_folder, tmp_path):
    for name in ("sst2", "imdb"):
        (tmp_path / name).mkdir()
        rows = [dict(sentence1=f"tea {i}", label=i % 2) for i in range(30)]
        for s in ("train", "validation", "test"):
            (tmp_path / name / f"{s}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (r,) = T.compare_transfer(
        ["head-only"],
        config(backbone=str(small_folder), task="sst2", data=str(tmp_path), steps=2),
        "imdb",
        target_shots=0,
        seeds=1,
    )
    assert r["split_sizes"]["imdb"]["train"] == 30 and r["setting"] == "zero-shot"


@pytest.mark.grid
@pytest.mark.parametrize("kill", [7, 12])
def test_a_kill_loses_no_more_than_the_steps_since_an_evaluation(
    kill, small_folder, tmp_path, monkeypatch
):
    """Killed in the few-shot stage, and in its control."""
    tasks = small_task(train=16, validation=8, test=8), small_task("two-domains", 16, 8, 8)
    base = config("lpt", backbone=str(small_folder), steps=4, batch_size=8, lr=1e-2)
    steps = []
    original_step = TrainingRun.step

    def step(run):
        steps.append(run.task.name)
        if len(steps) == kill:
            raise Killed
        original_step(run)

    def compare(name):
        file = tmp_path / name / "transfer.jsonl"
        records = T.compare_transfer(["lpt"], base, "two-domains", 8, 1, False, None, file, tasks)
        return [(r["setting"], r["score"], r["validation"]) for r in records]

    whole = compare("whole")
    monkeypatch.setattr(TrainingRun, "step", step)
    with pytest.raises(Killed):
        compare("killed")
    assert compare("killed") == whole
    assert len(steps) - 1 <= 3 * base.steps + base.eval_every
    assert not list(tmp_path.glob("killed/.*-checkpoints"))


def test_an_interrupted_run_is_repeated(runs):
    go, messages, file = runs
    go(("head-only",), 1)
    whole = file.read_text().splitlines()
    file.write_text(whole[0] + "\n")
    assert [r["setting"] for r in go(("head-only",), 1)] == [
        "zero-shot",
        "few-shot",
        "alone",
    ] and len(messages) == 2


@pytest.mark.long
def test_learning_rates_are_chosen_on_validation(runs, monkeypatch):
    go, _, _ = runs
    fitted = []
    fit = T.fit

    def watched(model, task, cfg, checkpoint_dir=None):
        fitted.append((cfg.seed, task.name, cfg.lr))
        log = fit(model, task, cfg)
        is_best = cfg.lr == T.METHODS["head-only"].learning_rates[2]
        return replace(log, validation=float(is_best))

    monkeypatch.setattr(T, "fit", watched)
    grid = T.METHODS["head-only"].learning_rates
    out = go(("head-only",), cfg=dict(lr=None), tune_learning_rates=True)

    def stages(seed, first):
        return [(seed, "sentiment", lr) for lr in first] + 2 * [
            (seed, "flipped", lr) for lr in grid
        ]

    assert fitted == stages(0, grid) + stages(
        1, grid[2:]
    )  # the model that chose is the one that is scored
    assert {r["lr"] for r in out} == {r["stage_learning_rate"] for r in out} == {grid[2]} and {
        r["lr_selection"] for r in out
    } == {"best of 3 on validation"}
    fitted.clear()
    go(("head-only",), 3, cfg=dict(lr=None), tune_learning_rates=True)
    assert fitted == stages(2, grid[2:])  # the learning rate is in the file
    assert {r["lr"] for r in go(("head-only",), cfg=dict(lr=None))} == {grid[1]}
    with pytest.raises(ValueError, match="no learning rate"):
        T.run_transfer(config(lr=None), small_task(), small_task())


@pytest.mark.long
def test_a_record_of_transfer_can_be_paired_by_example(runs):
    """It has digests of both tasks, the losses, and logits of every example."""
    go, _, file = runs
    records = go()
    tasks = small_task(), flipped(small_task("two-domains", 16))
    assert read_records(file) == json.loads(json.dumps(records))
    for r in records:
        assert (
            (r["schema"], r["status"]) == (SCHEMA_VERSION, "done")
            and r["provenance"]["started_at"]
            and len(r["losses"]) == r["steps_done"]
        )
        assert r["digests"] == dict(
            weights=records[0]["digests"]["weights"],
            data=tasks[0].digest(),
            target=tasks[1].digest(),
        )
        assert r["metric"] == "accuracy+macro_f1" and not has_per_example_results(
            r, file.parent
        )  # that score is not a mean over examples
        assert has_per_example_results(r, file.parent, metric_name="scores.accuracy")
        answers = per_example_scores(r, file.parent)
        assert answers.mean() == pytest.approx(r["scores"]["accuracy"]) and len(answers) == 24
        assert len(per_example_scores(r, file.parent, split="validation")) == 24
    assert len({r["logits"] for r in records}) == len(records) == 12
    assert [*(file.parent / "logits").glob("[!.]*")] == [file.parent / f"logits/{file.stem}.npz"]
    sides = [f"{m} setting=few-shot @scores.accuracy" for m in ("lpt", "head-only")]
    paired = estimate_contrast(records, *sides, folder=file.parent)
    mean = [
        sum(
            r["scores"]["accuracy"]
            for r in records
            if (r["method"], r["setting"]) == (m, "few-shot")
        )
        / 2
        for m in ("lpt", "head-only")
    ]
    assert (
        paired["texts"] == 24
        and paired["runs"] == 2
        and paired["effect"] == pytest.approx(mean[0] - mean[1])
    )
    alone = estimate_contrast(
        records, *(f"{m} setting=few-shot" for m in ("lpt", "head-only")), folder=file.parent
    )
    assert alone["texts"] == 0
    (file.parent / f"logits/{file.stem}.npz").unlink()
    with pytest.raises(MissingFileError, match="t.npz is missing"):
        estimate_contrast(records, *sides, folder=file.parent)


@pytest.mark.long
def test_a_record_of_other_data_or_weights_is_not_the_result(runs):
    go, messages, file = runs
    go(("head-only",), 1)
    lines = read_records(file)
    for key in ("weights", "data", "target"):
        changed = [{**r, "digests": {**r["digests"], key: "another"}} for r in lines]
        file.write_text("".join(json.dumps(r) + "\n" for r in changed))
        assert len(go(("head-only",), 1)) == 3 and len(messages) == 3


@pytest.mark.grid
@pytest.mark.parametrize(
    "bad,lost,tuned", [("sentiment", 3, True), ("flipped", 2, True), ("flipped", 2, False)]
)
def test_a_stage_that_diverges(bad, lost, tuned, runs, monkeypatch):
    """Its settings are recorded as diverged and not repeated; all other runs finish."""
    go, messages, file = runs
    calls = []
    fit = T.fit

    def broken(model, task, cfg, checkpoint_dir=None):
        calls.append((cfg.method, task.name, cfg.seed))
        if cfg.method == "lpt" and task.name == bad:
            raise FloatingPointError("the loss is nan at step 2")
        return fit(model, task, cfg)

    monkeypatch.setattr(T, "fit", broken)

    def again():
        return go(("lpt", "head-only"), 2, tune_learning_rates=tuned, cfg=dict(lr=None))

    records = again()
    n = (
        1 if tuned and bad == "sentiment" else 2
    )  # the second seed needs the learning rate of the first
    mine = [r for r in records if r["method"] == "lpt"]
    assert [r["status"] for r in mine] == (["done"] * (3 - lost) + ["diverged"] * lost) * n
    assert len(records) == 3 * n + 6 == len(messages) and f"{lost * n}" == str(
        sum("diverged: " in s for s in messages)
    )
    diverged = mine[-1]
    assert (
        "diverged" in diverged["message"]
        and diverged["versions"]
        and diverged["digests"].keys() == {"weights", "data", "target"}
    )
    t = T.transfer_table(records)
    assert list(t.loc["lpt"])[-lost:] == ["diverged"] * lost and "diverged" not in list(
        t.loc["head-only"]
    )
    calls.clear()
    assert again() == read_records(file) and not calls and not messages
    with pytest.raises(FloatingPointError, match="diverged"):
        T.transfer_table([diverged])


def test_given_learning_rates_are_tried_and_recorded(runs, monkeypatch):
    go, _, _ = runs
    fitted = []
    fit = T.fit
    monkeypatch.setattr(
        T, "fit", lambda m, t, c, **_: fitted.append((t.name, c.lr)) or fit(m, t, c)
    )
    out = go(
        ("head-only",), 1, cfg=dict(lr=None), tune_learning_rates=True, learning_rates=(1e-3, 2e-3)
    )
    assert fitted == [(t, lr) for t in ("sentiment", "flipped", "flipped") for lr in (1e-3, 2e-3)]
    assert {r["lr_selection"] for r in out} == {"best of 2 (0.001, 0.002) on validation"}
    fitted.clear()
    go(("head-only",), 1, cfg=dict(lr=None), tune_learning_rates=True, learning_rates=(1e-3, 2e-3))
    assert not fitted
    go(("head-only",), 1, cfg=dict(lr=None), tune_learning_rates=True)
    assert len(fitted) == 9  # another grid is another choice


def test_a_table_has_a_column_for_each_setting_and_the_majority():
    shared = dict(status="done", task="a", target="b", backbone="c", head="d", majority_score=54.32)
    records = [
        dict(shared, method=method, setting=setting, score=score)
        for method, setting, scores in (
            ("lpt", "zero-shot", (60.0, 62.0)),
            ("lpt", "few-shot", (70.04,)),
            ("head-only", "zero-shot", (50.0,)),
        )
        for score in scores
    ]
    table = T.transfer_table(records)
    assert table.loc["lpt", ("a → b", "zero-shot")] == "61.0 ± 1.4"
    assert table.loc["lpt", ("a → b", "few-shot")] == "70.0"
    assert [*table.index] == ["lpt", "head-only", "majority"]
    assert [*table.loc["majority"]] == ["54.3"] * 2
    with pytest.raises(ValueError, match="2 different settings"):
        T.transfer_table([*records, {**records[0], "backbone": "other"}])


def test_the_published_table_has_the_printed_scores():
    p = T.published_transfer_table()
    assert (
        p.loc["lpt-npg", ("mrpc → qqp", "few-shot")] == 74.4
        and p.loc["fine-tuning", ("qqp → mrpc", "few-shot")] == 79.7
        and p.loc["smop", ("imdb → sst2", "zero-shot")] == 83.3
        and p.shape == (8, 6)
        and p.notna().sum().sum() == 38
    )


# --- what stages must not share


def test_every_stage_has_its_own_initial_state(small_folder, monkeypatch):
    a = small_task()
    b = flipped(small_task("two-domains", 16))
    seen = []

    def fake(m, t, c, checkpoint_dir=None):
        seen.append(
            (
                c.init_from,
                torch.rand(1).item(),
                torch.cat([p.detach().flatten() for p in m.trained_parameters().values()]),
            )
        )
        for p in m.trained_parameters().values():
            p.data.add_(0.01)
        return TrainLog(50.0, steps=1, losses=[1.0])

    loaded = []
    monkeypatch.setattr(T, "fit", fake)
    monkeypatch.setattr(
        sys.modules["idp_tutorial.runs.experiment"],
        "load_first_stage",
        lambda m, folder: loaded.append(folder),
    )
    T.run_transfer(
        config(method="fine-tuning", backbone=str(small_folder), init_from="x"),
        a,
        b,
        learning_rates=(1e-3, 1e-2),
    )
    assert [s[0] for s in seen] == ["x"] + 4 * [None] and loaded == [
        "x"
    ]  # the control does not start from the first stage
    assert seen[1][1] == seen[2][1]  # the same dropout for every learning rate
    assert torch.equal(seen[3][2], seen[0][2])  # the control starts from the pretrained weights


def test_the_draw_reaches_both_tasks(monkeypatch):
    seen = []
    monkeypatch.setattr(T, "run_transfer", lambda cfg, a, b, *_: seen.extend([a, b]) or [])
    T.compare_transfer(
        ["head-only"],
        config(method="lpt", shots=8, split_seed=3),
        "two-domains",
        target_shots=4,
        seeds=1,
    )
    for t, n in zip(seen, (8, 4)):
        assert (
            t.splits["train"]
            == load_task(t.name, None, n, 3).splits["train"]
            != load_task(t.name, None, n).splits["train"]
        )


def test_an_unstratified_draw_and_a_head_at_the_probe_reach_the_first_task(monkeypatch):
    seen = []
    begun = []
    monkeypatch.setattr(T, "run_transfer", lambda cfg, a, b, *_: seen.extend([a, b]) or [])
    T.compare_transfer(
        ["head-only"],
        config(method="lpt", shots=8, stratified=False),
        "two-domains",
        target_shots=4,
        seeds=1,
    )
    assert seen[0].splits["train"] == load_task(seen[0].name, None, 8, 0, False).splits["train"]
    run = sys.modules["idp_tutorial.runs.experiment"]
    monkeypatch.setattr(run, "initialise_head_from_probe", lambda m, t, c: begun.append(t.name))
    for method, want in (("lpt", ["sentiment"]), ("efl", [])):
        begun.clear()
        cfg = config(method=method, head_init="probe", task="sentiment")
        Experiment(cfg, load_task("sentiment")).build_model()
        assert begun == want  # an entailment head has other outputs


def test_a_layer_that_is_given_leaves_adapterdrop_at_its_half(monkeypatch):
    seen = []
    monkeypatch.setattr(
        T, "run_transfer", lambda cfg, *_: seen.append((cfg.method, cfg.get("layer"))) or []
    )
    T.compare_transfer(
        ["adapterdrop", "lpt"], config(task="sentiment", layer=2, lr=0.1), "two-domains", seeds=1
    )
    assert seen == [("adapterdrop", None), ("lpt", 2)]
