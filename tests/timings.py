"""Helpers of the tests that time methods."""

import torch

from idp_tutorial.training.fit import TrainLog
from results.speed import timing
from results.speed.timing import make_benchmark_config


def tiny_base(bb, **kw):
    return make_benchmark_config(bb, **{**dict(batch_size=2, length=24), **kw})


def state(bb):
    return {n: p.detach().clone() for n, p in bb.model.state_dict().items()}


def as_it_was(bb, before):
    """Return whether the tensors are the same, nothing is trained, and eval mode is on.

    Fine-tuning at a learning rate of 1e-8 changes no tensor.
    """
    after = bb.model.state_dict()
    return (
        after.keys() == before.keys()
        and all(torch.allclose(after[n], before[n], atol=1e-5) for n in after)
        and bb.active_edit is None
        and not any(p.requires_grad or p.grad is not None for p in bb.model.parameters())
        and not any(m.training for m in bb.model.modules())
    )


def replace_fit(monkeypatch):
    """Record the config of each `fit`; `times[method]` are its times, one a call."""
    seen = []
    times = {}

    def fit(model, task, cfg):
        seen.append(cfg)
        return TrainLog(
            0.0,
            ms_per_step=times.get(cfg.method, [10.0] * 99)[
                sum(
                    (c.method, c.get("layer"), c.cache) == (cfg.method, cfg.get("layer"), cfg.cache)
                    for c in seen
                )
                - 1
            ],
            peak_memory_mb={"fine-tuning": 800.0}.get(cfg.method, 200.0),
        )

    monkeypatch.setattr(timing, "fit", fit)
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)
    return seen, times
