"""Linear probes of each layer: the chosen layer, and tasks without classes."""

import pytest
from small import refused, setting, small_task

from results.pretraining.probes import fit_linear_probes


def test_the_layer_is_chosen_on_validation():
    bb, task, _, _ = setting()
    r = fit_linear_probes(bb, task, n_train=24)
    assert (r["task"], r["backbone"], r["n_train"]) == (task.name, bb.name, 24)
    assert len(r["validation"]) == len(r["test"]) == bb.n_layers + 1
    assert r["best"] == r["validation"].index(max(r["validation"]))
    assert r["score"] == r["test"][r["best"]]


@pytest.mark.parametrize("name,kind", [("similarity", "regression"), ("in-short", "texts")])
def test_what_is_refused(name, kind):
    refused(
        lambda: fit_linear_probes(setting()[0], small_task(name)),
        kind,
        "needs one class for each row",
    )
