"""Sweeps whose training is replaced, and synthetic records of sweeps."""

from small import small_task

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.record import build_record
from idp_tutorial.training.fit import TrainLog
from results.depth.layer_sweep import sweep_prompt_layer


def pretend(monkeypatch, crash_after=None):
    """Replace training by a function that takes no time; return the list of runs."""
    ran = []

    def fit(self, checkpoint_dir=None):
        cfg = self.cfg
        if crash_after is not None and len(ran) >= crash_after:
            raise KeyboardInterrupt
        ran.append((cfg.method, cfg.get("layer"), cfg.seed, cfg.lr))
        return None, TrainLog(70 + 10 * (cfg.lr or 0) + (cfg.get("layer") or 0))

    def score(self, model, log, score_test=True, records_file=None):
        return build_record(
            self.cfg,
            self.digests(),
            self.task.split_sizes(),
            self.start_time,
            metric=self.task.metric,
            score=log.validation,
            validation=log.validation,
            params=dict(prompt=4, head=2, backbone=0),
            history=[[1, 50.0], [2, log.validation]],
            ms_per_step=10.0 - (self.cfg.get("layer") or 0),
            peak_memory_mb=5.0,
        )

    monkeypatch.setattr(Experiment, "fit", fit)
    monkeypatch.setattr(Experiment, "score", score)
    return ran


BASE = RunConfig(task="sentiment", steps=3, device="cpu")
TASK = small_task()


def swept(methods=("lpt",), layers=(0, 2), seeds=2, base=BASE, **kw):
    return sweep_prompt_layer(list(methods), base, layers, seeds, task=TASK, **kw)


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
    dict(metric="macro_f1"),
]


def fake(scores, noise=0.5, seeds=3, method="lpt", **fields):
    """Make records of a sweep with these mean scores, one for each layer."""
    shared = dict(
        status="done",
        method=method,
        task="toy",
        shots=None,
        backbone="toy",
        head="classification",
        metric="accuracy",
        n_layers=len(scores),
        prompt_length=10,
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
