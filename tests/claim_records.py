"""A record of a run, for tests of contrasts and claims."""


def record(method, seed, score, **kw):
    kw = (
        dict(
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
