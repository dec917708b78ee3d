"""Sweeps whose training is replaced, and synthetic records of sweeps."""

from dataclasses import asdict

from small import small_task

from idp_tutorial.reproduction.analysis.layer_sweep import sweep_prompt_layer
from idp_tutorial.runs import experiment as experiment_run
from idp_tutorial.runs import tune as learning_rate_search
from idp_tutorial.utils.config import RunConfig


def pretend(monkeypatch, crash_after=None):
    """Replace training by a function that takes no time; return the list of runs."""
    ran = []

    def train(cfg, task):
        if crash_after is not None and len(ran) >= crash_after:
            raise KeyboardInterrupt
        ran.append((cfg.method, cfg.layer, cfg.seed, cfg.lr))
        return cfg, dict(validation=70 + 10 * (cfg.lr or 0) + (cfg.layer or 0))

    def record(model, log, task, cfg, score_test=True, records_file=None):
        score = log["validation"]
        return {
            **asdict(cfg),
            "data": cfg.data and cfg.data.split("/")[-1],
            "metric": "accuracy",
            "score": score,
            "validation": score,
            "params": dict(prompt=4, head=2, backbone=0),
            "history": [[1, 50.0], [2, score]],
            "ms_per_step": 10.0 - (cfg.layer or 0),
            "peak_memory_mb": 5.0,
            "steps": cfg.steps,
            "split_sizes": {s: len(r) for s, r in task.splits.items()},
        }

    for module in (learning_rate_search, experiment_run):
        monkeypatch.setattr(module, "train_model", train)
        monkeypatch.setattr(module, "make_record", record)
    return ran


BASE = RunConfig(task="sentiment", steps=3, device="cpu")
TASK = small_task()


def swept(methods=("lpt",), layers=(0, 2), seeds=2, base=BASE, **kw):
    return sweep_prompt_layer(
        list(methods), base, layers, seeds, task=TASK, report=lambda s: None, **kw
    )


SETTINGS = [
    dict(steps=4),
    dict(prompt_length=3),
    dict(shots=5),
    dict(split_seed=1),
    dict(head="verbalizer"),
    dict(lr=0.7),
    dict(weight_decay=0.5),
    dict(batch_size=8),
    dict(max_len=64),
    dict(head_lr=0.1),
    dict(eval_every=3),
    dict(precision="bf16"),
    dict(cache="hidden"),
]


def fake(scores, noise=0.5, seeds=3, method="lpt", **fields):
    """Make records of a sweep with these mean scores, one for each layer."""
    shared = dict(
        method=method,
        task="toy",
        shots=None,
        backbone="toy",
        head="classification",
        metric="accuracy",
        n_layers=len(scores),
        seconds=10.0,
        tuning_seconds=5.0,
        params=dict(prompt=10, head=2),
        lr=0.1,
    )

    def record(layer, score, seed):
        return {
            **shared,
            "layer": layer,
            "seed": seed,
            "score": score + noise * (seed - 1),
            "validation": score,
            "history": [[1, score - 5], [2, score + seed]],
            "ms_per_step": 2.0 * len(scores) - layer,
            "peak_memory_mb": 100.0 - 5 * layer,
            **fields,
        }

    return [
        record(layer, score, seed) for layer, score in enumerate(scores) for seed in range(seeds)
    ]


HUMP = fake([60, 63, 66, 66, 63, 60])
