"""A record of a run, for tests of contrasts and claims."""

from idp_tutorial.utils.records import SCHEMA_VERSION


def record(method, seed, score, **kw):
    kw = (
        dict(
            schema=SCHEMA_VERSION,
            status="done",
            task="t",
            shots=None,
            split_seed=0,
            backbone="b",
            head="h",
            metric="accuracy",
            split_sizes=dict(test=1000),
        )
        | kw
    )
    return dict(method=method, seed=seed, score=score, **kw)


def finished_record(method, seed, score, prompt=0, **kw):
    """Return a record with what a table needs."""
    costs = dict(ms_per_step=10.0, peak_memory_mb=20.0, steps=300, lr=1e-2)
    params = dict(prompt=prompt, head=258, backbone=0)
    fields = dict(validation=score + 1, params=params, **costs)
    return record(method, seed, score, **fields | kw)
