"""One run: its record, its folder, and what it refuses."""

import json
import shutil
from dataclasses import replace
from operator import itemgetter

import numpy as np
import pytest
import safetensors.torch
import torch
from small import (
    backbone,
    config,
    in_threads,
    refused,
    small_task,
    topic_task,
    without_times,
    write_glove,
)

from idp_tutorial.assembly.build import build_model
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.runs import experiment
from idp_tutorial.runs.experiment import (
    Experiment,
    run_experiment,
    score_controls,
    train_and_save,
    warn_of_better_controls,
)
from idp_tutorial.runs.logits import load_logits, split_outputs
from idp_tutorial.runs.record import RunStore, make_fingerprint
from idp_tutorial.runs.tables import (
    results_table,
)
from idp_tutorial.saving.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.training import evaluation
from idp_tutorial.training.evaluation import model_outputs, predict
from idp_tutorial.training.fit import fit
from idp_tutorial.utils import records
from idp_tutorial.utils.checks import DivergenceError, UserError
from idp_tutorial.utils.records import read_records
from idp_tutorial.utils.tensor_files import PROMPTS_FILE


def test_the_fields_of_a_record(cfg, task, tmp_path):
    r = run_experiment(cfg(shots=64), task, tmp_path / "new/records.jsonl")
    assert {
        *[
            "method",
            "task",
            "backbone",
            "shots",
            "seed",
            "metric",
            "score",
            "params",
            "ms_per_step",
            "peak_memory_mb",
            "steps",
            "versions",
        ]
    } <= r.keys()
    assert (
        {*r["params"]} == {"prompt", "head", "backbone"}
        and r["params"]["head"] == 2 * 32 + 2
        and r["params"]["backbone"] == 0
    )
    assert (r["method"], r["task"], r["shots"], r["seed"], r["metric"], r["steps"], r["lr"]) == (
        "lpt-npg",
        "sentiment",
        64,
        0,
        "accuracy",
        3,
        1e-2,
    )
    assert (
        0 <= r["score"] <= 100
        and r["score"] == r["scores"]["accuracy"]
        and r["ms_per_step"] > 0
        and r["peak_memory_mb"] > 0
    )
    assert 0 < r["validation_loss"] < 10
    assert r["validation"] == max(s for _, s in r["history"]) and r["split_sizes"] == dict(
        train=64, validation=24, test=24
    )
    assert (
        r["versions"]["torch"] == torch.__version__
        and {"python", "transformers", "idp_tutorial"} <= r["versions"].keys()
    )
    again = json.loads(json.dumps(r, allow_nan=False))
    assert (
        read_records(tmp_path / "new/records.jsonl") == [again] and len(results_table([again])) == 1
    )


# training/test_fit.py compares losses and weights of two runs of every method
DAILY_METHODS = ("head-only", "prompt-tuning", "m-idpg-phm", "lora")


@pytest.mark.grid
@pytest.mark.parametrize(
    "method",
    [m if m in DAILY_METHODS else pytest.param(m, marks=pytest.mark.slow) for m in METHODS],
)
def test_equal_configs_give_equal_records(method, cfg, task):
    a = run_experiment(cfg(method=method), task)
    torch.rand(3)
    assert without_times(a) == without_times(run_experiment(cfg(method=method), task))
    assert without_times(a) != without_times(run_experiment(cfg(method=method, seed=1), task))


def test_another_thread_is_refused_between_the_initialisation_and_the_first_step(
    cfg, task, monkeypatch
):
    def build_elsewhere(cfg):
        with pytest.raises(UserError, match="another thread of this process"):
            build_model(cfg, backbone(), task)
        return True

    def fit_after_others(model, task, cfg, **options):
        refused_elsewhere.extend(in_threads(build_elsewhere, [cfg]))
        return fit(model, task, cfg, **options)

    refused_elsewhere = []
    monkeypatch.setattr(experiment, "fit", fit_after_others)
    Experiment(cfg(method="lpt"), task).fit()
    assert refused_elsewhere == [True]


def test_a_run_does_not_change_later_runs(cfg, task):
    before = run_experiment(cfg(method="lpt"), task)
    run_experiment(cfg(method="fine-tuning", lr=0.05), task)
    run_experiment(cfg(method="prompt-tuning", precision="bf16", accumulate=2), task)
    assert without_times(run_experiment(cfg(method="lpt"), task)) == without_times(before)


def test_a_record_has_the_name_of_the_given_task(cfg, task, tmp_path):
    mine = replace(task, name="mine")
    assert run_experiment(cfg(task="trec"), mine)["task"] == "mine"
    assert train_and_save(cfg(task="trec"), tmp_path / "run", mine)["task"] == "mine"


def test_default_learning_rates(cfg, task):
    for m in METHODS:
        experiment = Experiment(cfg(method=m, lr=None), task)
        assert experiment.cfg.lr == METHODS[m].default_learning_rate
    untrained = run_experiment(cfg(method="head-only", head="verbalizer"), task)
    assert untrained["steps_done"] == 0


@pytest.mark.grid
@pytest.mark.parametrize("name,k", [("questions", 12), ("entailment", 10), ("similarity", 8)])
def test_few_shot_runs_of_bundled_tasks(name, k, cfg):
    r = run_experiment(cfg(task=name, shots=k, steps=1, batch_size=4, eval_every=1))
    assert r["split_sizes"] == {"train": k, "validation": 1000, "test": 1000} and r["metric"] == (
        "pearson+spearman" if name == "similarity" else "accuracy"
    )


@pytest.mark.parametrize(
    "kw,words",
    [
        (
            dict(method="lpt-ngp"),
            ["unknown method 'lpt-ngp'", "did you mean 'lpt-npg'?", "Known: head-only"],
        ),
        (dict(head="verbalisr"), ["head must be ", "got 'verbalisr'", "'verbalizer'"]),
        (dict(task="sentimnt"), ["unknown task 'sentimnt'", "'sentiment'"]),
        (dict(backbone="tinny"), ["no backbone 'tinny'", "Did you mean 'tiny'?"]),
        (dict(layer=9), ["between 0 and 2", "got 9"]),
        (dict(template="oral", head="verbalizer"), ["no template 'oral'"]),
    ],
)
def test_unknown_names_are_refused(kw, words, cfg, tmp_path):
    refused(lambda: run_experiment(cfg(**kw), append_to=tmp_path / "records.jsonl"), *words)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(steps=0), ["steps must be at least 1, got 0"]),
        (dict(batch_size=0), ["batch_size must be at least 1, got 0"]),
        (dict(accumulate=0), ["accumulate must be at least 1, got 0"]),
        (dict(eval_every=0), ["eval_every must be at least 1, got 0"]),
        (dict(lr=0.0), ["lr must be a positive number, got 0.0"]),
        (dict(lr=-1.0), ["lr must be a positive number, got -1.0"]),
        (dict(lr=float("nan")), ["lr must be a positive number, got nan"]),
        (dict(device="gpu"), ["device must be ", "got 'gpu'", "'auto' or 'cpu'"]),
        (dict(precision="half"), ["precision must be ", "got 'half'", "'bf16'"]),
    ],
)
def test_invalid_numbers_are_refused(kw, words):
    refused(lambda: config(**kw), *words)


def test_the_head_has_its_own_learning_rate(cfg, task):
    def moved(**kw):
        r = build_model(c := cfg(method="lpt", steps=3, **kw), backbone(), task)
        old = {n: p.detach().clone() for n, p in r.trained_parameters().items()}
        fit(r, task, c)
        return [
            max(
                (p - old[n]).abs().max().item()
                for n, p in r.trained_parameters().items()
                if n.startswith(part)
            )
            for part in ("head", "sources")
        ]

    both = moved(lr=1e-2)
    head = moved(lr=1e-6, head_lr=1e-2)
    prompt = moved(lr=1e-2, head_lr=1e-6)
    assert (
        head[0] == pytest.approx(both[0], rel=0.2)
        and head[1] < 1e-5
        and prompt[0] < 1e-5
        and prompt[1] == pytest.approx(both[1], rel=0.2)
    )
    with pytest.raises(ValueError, match="head_lr must be a positive number, got 0"):
        cfg(head_lr=0.0)


def test_a_backbone_in_half_precision_is_refused():
    bb = backbone()
    bb.model.half()
    with pytest.raises(
        ValueError,
        match="weights in torch.float16: load it without dtype=",
    ):
        build_model(config(), bb, small_task())


def test_a_run_uses_the_split_seed(cfg, monkeypatch):
    class SeenError(Exception):
        pass

    def see(self, checkpoint_dir=None):
        raise SeenError(self.task)

    monkeypatch.setattr(Experiment, "fit", see)
    with pytest.raises(SeenError) as e:
        run_experiment(cfg(shots=8, split_seed=3))
    assert (
        e.value.args[0].splits["train"]
        == load_task("sentiment", None, 8, 3).splits["train"]
        != load_task("sentiment", None, 8).splits["train"]
    )


def test_a_control_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="majority.* is a control and has no prompt to save"):
        train_and_save(config(method="majority"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_logits_of_other_weights_do_not_replace_the_old_ones(cfg, task, tmp_path):
    """The folders of two backbones have the same name; each record has its own logits."""
    out = tmp_path / "c.jsonl"
    records = []
    logits = []
    bb = shutil.copytree(
        cfg().backbone, tmp_path / "a" / "bb", ignore=shutil.ignore_patterns("SHA256SUMS")
    )
    other = shutil.copytree(bb, tmp_path / "b" / "bb")
    weights = safetensors.torch.load_file(bb / "model.safetensors")
    name = next(k for k in weights if "word_embeddings" in k)
    safetensors.torch.save_file(
        {**weights, name: weights[name] + 1}, other / "model.safetensors", {"format": "pt"}
    )
    for folder in (bb, other, bb):
        r = run_experiment(cfg(method="head-only", lr=0.1, backbone=str(folder)), task, out)
        records.append(r)
        logits.append((r["logits"], load_logits(r, tmp_path)["test"]))
    (a, one), (b, two), (c, same) = logits
    assert (
        a == c != b
        and (one == same).all()
        and not (one == two).all()
        and (load_logits(records[0], tmp_path)["test"] == one).all()
    )


def test_the_validation_split_is_not_scored_again_after_training(cfg, task, tmp_path, monkeypatch):
    """Its stored logits are those of the best evaluation, not of the last."""
    run_cfg = replace(cfg(lr=1e-2), steps=8, eval_every=2)
    scored = []

    def count_and_compute(model, examples, *args):
        scored.append(len(examples))
        return model_outputs(model, examples, *args)

    monkeypatch.setattr(evaluation, "model_outputs", count_and_compute)
    model, record = Experiment(run_cfg, task).train(tmp_path / "run.jsonl")
    assert scored == [len(task.splits["test"])]
    again, _ = split_outputs(model, task, run_cfg, "validation")
    stored = load_logits(record, tmp_path)["validation"]
    np.testing.assert_array_equal(stored, again.numpy().astype(np.float16))
    assert (
        record["validation"]
        == max(Experiment(run_cfg, task).fit()[1].history, key=itemgetter(1))[1]
    )


def test_a_finished_model_is_not_replaced_by_one_with_other_word_vectors(cfg, task, tmp_path):
    """The same run may replace it; one with other contents of that file is refused."""

    def train(sign, folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        write_glove(
            dict(a=0, the=1), sign * np.arange(16.0).reshape(2, 8), tmp_path / folder / "glove.txt"
        )
        c = cfg(method="m-idpg-phm-glove", glove=str(tmp_path / folder / "glove.txt"))
        return train_and_save(c, tmp_path / "run", task, save_every=0)

    assert train(1, "a")["score"] == train(1, "b")["score"]
    with pytest.raises(ValueError, match="holds another run .glove was '"):
        train(-1, "b")


def test_numbers_of_the_wrong_type_are_refused(cfg):
    for kw, words in (
        (dict(steps=2.5), "steps must be a whole number, got 2.5"),
        (dict(prompt_length="5"), "prompt_length must be a whole number, got '5'"),
        (dict(shots=8.0), "shots must be a whole number, got 8.0"),
        (dict(steps=None), "steps must be a whole number, got None"),
        (dict(lr="1e-3"), "lr must be a positive number, got '1e-3'"),
    ):
        with pytest.raises(ValueError, match=words):
            cfg(**kw)


def test_a_run_that_diverges_leaves_a_record(cfg, task, tmp_path, wild):
    with pytest.raises(FloatingPointError, match="nan at step 2"):
        run_experiment(cfg(lr=9.0), task, tmp_path / "a.jsonl")
    (diverged,) = read_records(tmp_path / "a.jsonl")
    assert (diverged["status"], diverged["lr"], diverged["message"]) == (
        "diverged",
        9.0,
        "the loss is nan at step 2",
    )
    assert {*diverged["versions"]} == {"python", *records.RECORDED_PACKAGES}
    assert diverged["split_sizes"]["test"] == 24
    with pytest.raises(FloatingPointError):
        train_and_save(cfg(lr=9.0), tmp_path / "run", task)
    assert read_records(tmp_path / "run" / "record.jsonl")[0]["status"] == "diverged"
    train_and_save(cfg(lr=1e-2), tmp_path / "run", task)
    assert read_records(tmp_path / "run" / "record.jsonl")[0]["status"] == "done"


# ---- the metric of a run


@pytest.mark.grid
@pytest.mark.parametrize("metric", ["mcc", "log_loss", "accuracy+macro_f1"])
def test_the_metric_selects_the_checkpoint_and_is_recorded(metric):
    task = small_task("questions")
    experiment = Experiment(config("head-only", metric=metric, steps=9, eval_every=3), task)
    model, log = experiment.fit()
    record = experiment.score(model, log)
    name = metric.replace("log_loss", "neg_log_loss")
    assert record["metric"] == name and record["score"] == record["scores"][name]
    assert record["validation"] == max(score for _, score in record["history"])
    assert experiment.cfg.metric == name
    if name == "neg_log_loss":  # the model that was kept has the smallest loss
        logits, examples = split_outputs(model, experiment.task, experiment.cfg, "validation")
        labels = torch.tensor([e["label"] for e in examples])
        loss = torch.nn.functional.cross_entropy(logits, labels).item()
        assert record["validation"] == pytest.approx(-100 * loss, rel=1e-4)


def test_runs_with_different_metrics_are_different_runs(tmp_path):
    task = small_task()
    store = RunStore(tmp_path / "records.jsonl")
    plain, other, explicit = (
        Experiment(config("head-only", metric=metric), task) for metric in (None, "mcc", "accuracy")
    )
    fingerprints = [make_fingerprint(e.cfg, e.digests()) for e in (plain, other, explicit)]
    record = store.get_or_run(fingerprints[0], lambda: plain.train()[1])
    assert record["metric"] == "accuracy" and store.find(fingerprints[0]) == record
    assert store.find(fingerprints[1]) is None
    assert store.find(fingerprints[2]) == record  # the metric that the task has


def test_a_metric_that_does_not_exist_or_fit_is_refused():
    with pytest.raises(ValueError, match="unknown metric 'f3'"):
        config(metric="f3")
    with pytest.raises(ValueError, match="metric 'pearson' does not fit a task that has"):
        Experiment(config(metric="pearson"), small_task())


def test_a_model_of_several_labels_is_saved_and_loaded(tmp_path):
    task = topic_task(48, 12, 12)
    cfg = config("lpt-npg", task="topics", metric="macro_f1", backbone="tiny", steps=2)
    record = train_and_save(cfg, tmp_path, task, report=True)
    model, loaded_task, loaded_cfg = from_pretrained(tmp_path)
    assert loaded_task.multi_label and loaded_task.labels == task.labels
    assert loaded_cfg.metric == record["metric"] == loaded_task.metric == "macro_f1"
    predictions = predict(model, loaded_task, loaded_cfg, task.splits["test"])
    for prediction in predictions:
        chosen = [name for name, p in prediction["probabilities"].items() if p > 0.5]
        assert prediction["label"] == chosen
    indicators = [[int(n in p["label"]) for n in task.labels] for p in predictions]
    labels = [row["label"] for row in task.splits["test"]]
    assert task.score(indicators, labels)["macro_f1"] == pytest.approx(record["score"])
    assert (tmp_path / "report/report.md").is_file()


def test_a_report_of_generated_text_is_refused_before_training(tmp_path):
    cfg = config("prompt-tuning", task="in-short", backbone="tiny-gpt2")
    with pytest.raises(ValueError, match="generates texts, and a report needs"):
        train_and_save(cfg, tmp_path / "run", report=True)
    assert not (tmp_path / "run").exists()


def test_a_model_of_an_unknown_run_is_not_replaced(cfg, task, tmp_path):
    c = cfg()
    model = build_model(c, backbone(), task)
    save_pretrained(model, tmp_path, task, c)
    before = (tmp_path / PROMPTS_FILE).read_bytes()
    with pytest.raises(UserError, match="saved without the record of its run: use another"):
        train_and_save(c, tmp_path, task)
    assert (tmp_path / PROMPTS_FILE).read_bytes() == before


def test_a_run_whose_test_outputs_are_not_finite_leaves_its_folder_free(
    cfg, task, tmp_path, monkeypatch
):
    def fail(*args):
        raise DivergenceError("the outputs are not finite")

    with monkeypatch.context() as m:
        m.setattr(experiment, "split_outputs", fail)
        with pytest.raises(DivergenceError):
            train_and_save(cfg(lr=1e-2), tmp_path, task)
    assert train_and_save(cfg(lr=1e-3), tmp_path, task)["lr"] == 1e-3


def test_controls_are_scored_beside_a_run(cfg, task):
    run = cfg(method="lpt", lr=1e-3)
    scores = score_controls(run, task)
    assert scores.keys() == {"words", "probe"} and all(0 <= v <= 100 for v in scores.values())
    on_validation = score_controls(run, task, "validation")
    _, record = Experiment(run.with_method("words", lr=None), task).train()
    assert scores["words"] == record["score"] and on_validation["words"] == record["validation"]
    one_class = [row for row in task.splits["train"] if row["label"] == 0]
    assert score_controls(run, replace(task, splits={**task.splits, "train": one_class})) == {}


def test_a_method_below_a_control_has_a_warning():
    warning = warn_of_better_controls("lora", 70.0, dict(words=80.0, probe=90.0))
    assert warning.startswith("lora (70.0) scores lower than words and probe")
    assert "than probe:" in warn_of_better_controls("lora", 80.0, dict(words=80.0, probe=90.0))
    assert not warn_of_better_controls("lora", 90.0, dict(words=80.0, probe=90.0))
