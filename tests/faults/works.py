"""Works that write files; each gives the same result when it is started again."""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
from small import backbone, config, small_task
from torch.optim.optimizer import register_optimizer_step_post_hook

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import backbone_id
from idp_tutorial.reproduction.papers import reproduce
from idp_tutorial.runs import compare as comparison
from idp_tutorial.runs import experiment as experiments
from idp_tutorial.runs import record as run_records
from idp_tutorial.runs import tables as results
from idp_tutorial.runs.experiment import Experiment, train_and_save
from idp_tutorial.runs.logits import load_logits, write_run_arrays
from idp_tutorial.runs.record import RunStore, build_record
from idp_tutorial.saving.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.training.cache import cache_states
from idp_tutorial.training.fit import TrainLog, fit
from idp_tutorial.utils.durable_files import (
    file_lock,
    folder_lock,
    open_atomically,
    write_atomically,
)
from idp_tutorial.utils.records import (
    SCHEMA_VERSION,
    append_record,
    config_to_record,
    read_existing_records,
    read_records,
)
from idp_tutorial.utils.tensor_files import read_last_snapshot, write_snapshot
from results.pretraining.config import PretrainConfig
from results.pretraining.pretrain import pretrain, save_backbone
from results.transfer import scores as transfer
from results.transfer.scores import resolve_label_map

# the file that gets a byte for each step of an optimizer and each simulated run; []: nothing is
# counted
DONE = []
# what one kill may cost: the steps of an interval, or a simulated run
AGAIN = dict(
    training=1, pretraining=1, finishing=2, comparing=1, sweeping=1, transferring=1, reproducing=1
)


def did(*_):
    for file in DONE:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b".")
        os.close(descriptor)


register_optimizer_step_post_hook(did)


@cache
def task():
    return small_task(train=16, validation=8, test=8)


def build_small_model(cfg):
    return build_model(cfg, backbone(), task())


def digits(x):
    """Return a result as lists and dictionaries that can be compared."""
    if isinstance(x, torch.Tensor):
        return x.tolist()
    if isinstance(x, dict):
        return {str(k): digits(v) for k, v in x.items()}
    return [digits(v) for v in x] if isinstance(x, (list, tuple)) else x


def training(folder):
    log = fit(
        build_small_model(c := config(steps=4, batch_size=8)),
        task(),
        c,
        checkpoint_dir=folder,
        save_every=1,
    )
    return digits([log.losses, log.history, log.validation])


_real_fit = Experiment.fit
_real_score = Experiment.score


def _simulate_run(checkpoint_dir):
    """Count a simulated run, unless its checkpoint says that it is finished."""
    checkpoint = checkpoint_dir and Path(checkpoint_dir) / "finished"
    if checkpoint and checkpoint.exists():
        return
    did()
    if checkpoint:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(checkpoint, b"")


def _fit(self, checkpoint_dir=None, *save_every, **options):
    if checkpoint_dir and "-checkpoints" not in str(checkpoint_dir):  # `finishing` trains
        return _real_fit(self, checkpoint_dir, *save_every, **options)
    _simulate_run(checkpoint_dir)
    score = 50 + len(self.cfg.method) + self.cfg.seed
    history = [(1, score)]
    return None, TrainLog(score + (self.cfg.lr or 0), history, steps=self.cfg.steps)


def _score(self, model, log, score_test=True, records_file=None, **details):
    if model is not None:
        return _real_score(self, model, log, score_test, records_file, **details)
    return build_record(
        self.cfg,
        self.digests(score_test),
        self.task.split_sizes(),
        self.start_time,
        log=log,
        metric="accuracy",
        score=log.validation,
        params=dict(prompt=1, head=2, backbone=0),
    )


def pretend(monkeypatch):
    """Replace training in comparisons, whose files are tested."""
    monkeypatch.setattr(Experiment, "fit", _fit)
    monkeypatch.setattr(Experiment, "score", _score)
    # a digest of the weights takes longer than a work
    monkeypatch.setattr(run_records, "backbone_digest", lambda cfg: "0123456789abcdef")
    monkeypatch.setattr(comparison, "dry_run_comparison", lambda *a: None)
    for module in (comparison, reproduce):
        monkeypatch.setattr(module, "load_config_task", lambda cfg: task())
    monkeypatch.setattr(transfer, "run_transfer", _transfer)
    monkeypatch.setattr(results, "plot_scores", lambda *_: None)
    monkeypatch.setattr("matplotlib.figure.Figure", _Figure)


def _transfer(cfg, source, target, explicit_map, learning_rates, few_shot, records_file, folder):
    _simulate_run(folder)
    sizes = {t.name: {s: len(r) for s, r in t.splits.items()} for t in (source, target)}
    to = resolve_label_map(cfg, source, target, explicit_map)
    return [
        {
            "schema": SCHEMA_VERSION,
            "status": "done",
            **config_to_record(cfg),
            "target": target.name,
            "setting": setting,
            "metric": "accuracy",
            "score": 50.0 + cfg.seed,
            "split_sizes": sizes,
            "label_map": to and list(to),
        }
        for setting in ("zero-shot", "few-shot", "alone")
    ]


class _Figure:
    def __init__(self, figsize):
        pass

    def add_subplot(self):
        return None

    def savefig(self, file, **kw):
        file.write(b"a picture")


def timeless(records):
    return [
        {k: v for k, v in r.items() if "seconds" not in k and k != "provenance"} for r in records
    ]


def compared(folder, lr=None):
    comparison.compare_and_write(["head-only", "lpt"], config(lr=lr), 2, True, folder, True)


def comparing(folder):
    compared(folder)
    picture = (Path(folder) / "compare.png").read_bytes() == b"a picture"
    return digits(
        [
            timeless(read_records(Path(folder) / "compare.jsonl")),
            picture,
            (Path(folder) / "compare.csv").read_text().count("\n"),
        ]
    )


def sweeping(folder):
    file = Path(folder) / "sweep.jsonl"
    with file_lock(file):
        return _swept(file)


def _swept(file):
    store = RunStore(file)
    for layer in range(2):
        comparison.run_seeds(
            config(method="lpt", layer=layer, lr=None),
            task(),
            "best of 3 on validation, seed 0",
            2,
            store,
        )
    return digits(timeless(read_records(file)))


def reproducing(folder):
    """Run five insertion positions of IDPG's Figure 7."""
    reproduce.reproduce_table(
        "idpg-f7",
        backbone="tiny",
        seeds=1,
        out=folder,
        methods=["prompt-tuning"],
        tasks=["rte"],
    )
    return digits(timeless(read_records(Path(folder) / "idpg-f7-small.jsonl")))


def transferring(folder):
    both = task(), small_task("two-domains", train=16, validation=8, test=8)
    records = transfer.compare_transfer(
        ["head-only", "lpt"],
        config(),
        both[1].name,
        4,
        2,
        False,
        None,
        Path(folder) / "transfer.jsonl",
        both,
        tune_head_first=True,
    )
    return digits(timeless(records))


@cache
def corpus():
    from results.pretraining.corpus import encode_stream, train_tokenizer

    rows = small_task(train=300).splits["train"]
    tok = train_tokenizer([r["sentence1"] for r in rows], 400)
    return encode_stream([r["sentence1"] for r in rows], tok), tok


def pretraining(folder):
    cfg = PretrainConfig(
        d=32, n_layers=1, steps=4, tokens_per_step=64, lr=3e-3, warmup=2, held_out_tokens=256
    )
    model, log = pretrain(*corpus(), cfg, Path(folder), eval_every=1)
    return digits(
        [
            sum(p.double().sum().item() for p in model.parameters()),
            len(log),
            [r["lm"] for r in read_records(Path(folder) / "log.jsonl")],
        ]
    )


@cache
def cached():
    bb = backbone()
    return bb, task().encode(task().splits["train"], bb.tokenizer, 60, None)


def caching(folder):
    bb, rows = cached()
    states, _ = cache_states(bb, rows, 2, folder)
    more, _ = cache_states(bb, rows[:8], "sentence", folder)
    return digits(
        [
            [e["hidden_states"].tolist() for e in states],
            [np.asarray(e["sentence"]).tolist() for e in more],
        ]
    )


def finishing(folder):
    """Run a whole `idp train`, with its prompts and its record."""
    c = config(steps=2, batch_size=8)
    experiments.load_config_backbone = lambda cfg: backbone()
    run_records.backbone_digest = lambda cfg: backbone_id(backbone())
    train_and_save(c, folder, task())
    (record,) = read_records(Path(folder) / "record.jsonl")
    return digits(
        [record["score"], record["history"], sorted(p.name for p in Path(folder).glob("[!.]*"))]
    )


@cache
def trained_prompts():
    c = config(steps=1, batch_size=8)
    torch.manual_seed(0)
    return build_small_model(c), c


def saving(folder):
    model, c = trained_prompts()
    save_pretrained(model, folder, task(), c)
    return reading(folder)


def reading(folder):
    model, _, cfg = from_pretrained(folder, bb=backbone())
    return digits([{n: p for n, p in model.named_parameters() if p.requires_grad}, str(cfg)])


def bundling(folder):
    bb = backbone()
    save_backbone(bb.model, bb.tokenizer, folder)
    return loading(folder)


def loading(folder):
    bb = load_backbone(str(folder))
    return digits(
        [
            sum(p.double().abs().sum().item() for p in bb.model.parameters()),
            bb.config.layer_norm_eps,
            bb.tokenizer("a cold beer").input_ids,
        ]
    )


def answering(folder):
    file = Path(folder) / "answers.jsonl"
    file.parent.mkdir(exist_ok=True)
    with open_atomically(file, "w", encoding="utf-8") as to:
        for i in range(3):
            print(json.dumps(dict(prediction=i)), file=to)
    return file.read_text(encoding="utf-8")


def recording(folder):
    file = Path(folder) / "records.jsonl"
    with file_lock(file):
        have = {r["seed"] for r in read_existing_records(file)}
        for seed in range(4):
            if seed not in have:
                append_record(dict(seed=seed, score=80.0 + seed), file)
    return sorted(map(str, read_records(file)))


def logits(folder):
    """Write the logits and the record of three runs, as a comparison does."""
    file = Path(folder) / "runs.jsonl"
    with file_lock(file):
        have = {r["seed"] for r in read_existing_records(file)}
        for seed in range(3):
            if seed not in have:
                arrays = dict(test=np.full((4, 2), seed, np.float16), test_label=np.arange(4))
                fields = write_run_arrays(file.parent / "logits/runs.npz", f"run{seed}", arrays)
                append_record(dict(seed=seed, **fields), file)
    return [[r["seed"], load_logits(r, folder)["test"].tolist()] for r in read_records(file)]


def snapshots(folder):
    with folder_lock(folder):
        steps = (read_last_snapshot(folder) or {"steps": []})["steps"]
        while len(steps) < 4:
            steps = [*steps, len(steps)]
            write_snapshot(folder, len(steps), dict(steps=steps, tensor=torch.arange(9)))
    return json.dumps(steps)


QUICK = dict(
    recording=recording, logits=logits, snapshots=snapshots, caching=caching, saving=saving
)
WORKS = dict(
    **QUICK,
    training=training,
    comparing=comparing,
    sweeping=sweeping,
    pretraining=pretraining,
    finishing=finishing,
    bundling=bundling,
    transferring=transferring,
    answering=answering,
    reproducing=reproducing,
)
