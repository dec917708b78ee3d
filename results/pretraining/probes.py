"""Score a linear classifier on the frozen hidden states of each layer, for `probes.jsonl`."""

from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.data.task import Task, require_classes
from idp_tutorial.reproduction.analysis.probes import layer_features
from idp_tutorial.training.examples import encode_rows


def fit_linear_probes(
    bb: Backbone,
    task: Task,  # classification, with its splits
    n_train: int = 4000,  # maximum number of training examples
) -> dict:  # accuracies in %: `validation` and `test` by layer, `best` layer, its test `score`
    """Score a linear classifier on the hidden states of each layer (0 = embedding output).

    The best layer is the first with the highest accuracy on validation.
    """
    require_classes(task, "a linear probe")
    rows = {**task.splits, "train": task.splits["train"][:n_train]}
    X = {s: layer_features(bb, encode_rows(task, r, bb)).cpu().numpy() for s, r in rows.items()}
    y = {}
    for split, split_rows in rows.items():
        y[split] = [row["label"] for row in split_rows]
    accuracies: dict[str, list[float]] = dict(validation=[], test=[])
    for layer in range(bb.n_layers + 1):
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500))
        probe.fit(X["train"][layer], y["train"])
        for split, values in accuracies.items():
            values.append(round(100 * probe.score(X[split][layer], y[split]), 1))
    best = accuracies["validation"].index(max(accuracies["validation"]))
    return dict(
        task=task.name,
        backbone=bb.name,
        n_train=len(rows["train"]),
        **accuracies,
        best=best,
        score=accuracies["test"][best],
    )
