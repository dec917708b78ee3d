"""Callbacks of transformers, and logs of a training run: TensorBoard, Weights & Biases.

A callback is a `TrainerCallback` of transformers, so the integrations and callbacks that are
written for its `Trainer` work here. `CallbackRunner` calls them with what `Trainer` passes:
`TrainingArguments`, `TrainerState` and `TrainerControl`.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from idp_tutorial.utils.checks import UserError, check_choice

if TYPE_CHECKING:
    from transformers import TrainingArguments

LogFormat = Literal["tensorboard", "wandb"]


def make_log_callbacks(
    log_with: LogFormat | None,  # None: no log
) -> list:
    """Return the callbacks that write the log of a run.

    Raises: `UserError` if a package is missing.
    """
    check_choice(log_with, (None, *get_args(LogFormat)), "log_with")
    if log_with is None:
        return []
    from transformers.integrations import TensorBoardCallback, WandbCallback

    try:
        return [TensorBoardCallback() if log_with == "tensorboard" else WandbCallback()]
    except (ImportError, RuntimeError) as e:
        raise UserError(
            f"log_with={log_with!r} needs the package {log_with}: pip install {log_with}, or leave "
            "log_with out; record.jsonl has the losses and the history."
        ) from e


def _make_training_arguments(run: Any, folder: Path | str | None) -> "TrainingArguments":
    """Return the arguments of transformers' `Trainer` that describe a run."""
    from transformers import TrainingArguments

    class RunArguments(TrainingArguments):
        """Arguments that use the devices of the run, and leave accelerate's state unchanged."""

        _setup_devices = run.acc.device  # type: ignore[assignment]
        distributed_state = None

    cfg = run.cfg
    return RunArguments(
        output_dir=os.fspath(folder) if folder else None,
        run_name=cfg.run_name,
        max_steps=cfg.steps,
        per_device_train_batch_size=cfg.batch_size,
        gradient_accumulation_steps=cfg.accumulate,
        learning_rate=run.lr or 0.0,
        weight_decay=cfg.weight_decay,
        seed=cfg.seed,
        eval_strategy="steps",
        save_strategy="steps",
        logging_steps=cfg.eval_every,
        eval_steps=cfg.eval_every,
        save_steps=cfg.eval_every,
        load_best_model_at_end=True,
        metric_for_best_model=f"eval_{run.task.metric}",
        greater_is_better=True,
        report_to="none",
    )


def list_callbacks(
    callbacks: Any,  # `TrainerCallback` objects or classes, or others with some of its methods
) -> list[Any]:  # the same objects and classes
    """Return callbacks as a list.

    Raises: `UserError` for callbacks that are not in a list, and for other objects.
    """
    is_list = isinstance(callbacks, Iterable) and not isinstance(callbacks, (str, bytes, Mapping))
    listed = [*callbacks] if is_list else [callbacks]
    for callback in listed:
        if not is_list or not any(name.startswith("on_") for name in dir(callback)):
            raise UserError(
                "callbacks must be a list of transformers.TrainerCallback, or of objects with "
                f"methods such as on_step_end, got {callback!r:.60}: write callbacks=[...]."
            )
    return listed


class CallbackRunner:
    """The callbacks of a training run, and the state and control that they receive.

    As a context manager it calls `on_train_begin` and `on_train_end`. `should_training_stop` is
    honoured; the other fields of the control are not read.
    """

    def __init__(
        self,
        run: Any,  # a `TrainingRun` of `training.fit`
        callbacks: Iterable[Any] = (),  # as for `list_callbacks`; an object is made of each class
        folder: Path | str | None = None,  # folder of the run, for callbacks that write files
    ) -> None:
        self.run = run
        self.callbacks = [c() if isinstance(c, type) else c for c in list_callbacks(callbacks)]
        if not self.callbacks:
            return
        from transformers import TrainerControl, TrainerState

        self.control = TrainerControl()
        self.args = _make_training_arguments(run, folder)
        self.state = TrainerState(
            max_steps=run.cfg.steps,
            logging_steps=run.cfg.eval_every,
            eval_steps=run.cfg.eval_every,
            is_local_process_zero=run.acc.is_local_main_process,
            is_world_process_zero=run.acc.is_main_process,
        )
        self.n_logged = run.state.step  # steps whose losses are in the log
        if run.state.history:  # of a run that is resumed
            self.state.best_metric = max(score for _, score in run.state.history)
        self._restore(run.saved_callbacks)

    def _stateful_callbacks(self) -> dict[str, Any]:  # class, or class and number → callback
        """Return the callbacks with a state of their own, such as the count of early stopping."""
        from transformers.trainer_callback import ExportableState

        named: dict[str, Any] = {}
        for callback in self.callbacks:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                named[f"{name} {len(named)}" if name in named else name] = callback
        return named

    def _restore(self, states: Mapping[str, Any]) -> None:
        """Give each callback the attributes that it had when the run was stopped."""
        named = self._stateful_callbacks() if states else {}
        for name in named.keys() & states.keys():
            for attribute, value in states[name].items():
                setattr(named[name], attribute, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes of the callbacks with a state of their own, for a checkpoint."""
        if not self.callbacks:
            return {}
        return {
            name: callback.state().get("attributes", {})
            for name, callback in self._stateful_callbacks().items()
        }

    @property
    def should_stop(self) -> bool:
        """True if a callback has asked to stop the training."""
        return bool(self.callbacks) and self.control.should_training_stop

    def notify(
        self,
        event: str,  # name of a method of `TrainerCallback`, such as 'on_step_end'
        **values: Any,  # `logs` or `metrics`
    ) -> None:
        """Call a method of every callback."""
        if not self.callbacks:
            return
        run = self.run
        cfg = run.cfg
        examples_per_step = cfg.batch_size * cfg.accumulate * run.acc.num_processes
        self.state.global_step = run.state.step
        self.state.epoch = run.state.step * examples_per_step / len(run.train_examples)
        values |= dict(
            model=run.model,
            processing_class=run.model.backbone.tokenizer,
            optimizer=run.optimizer,
            lr_scheduler=run.lr_scheduler,
        )
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            control = method and method(self.args, self.state, self.control, **values)
            self.control = control or self.control

    def log_evaluation(
        self,
        score: float,  # validation score, in percent
    ) -> None:
        """Log the score, the mean loss since the last evaluation and the learning rate."""
        if not self.callbacks:
            return
        losses = torch.stack(self.run.state.losses[self.n_logged :] or self.run.state.losses[-1:])
        self.n_logged = self.run.state.step
        metrics = {f"eval_{self.run.task.metric}": score}
        logs = {
            "loss": losses.float().mean().item(),
            "learning_rate": self.run.lr_scheduler.get_last_lr()[0],
            **metrics,
        }
        self.state.log_history.append({**logs, "step": self.run.state.step})
        self.notify("on_log", logs=logs)
        self.notify("on_evaluate", metrics=metrics)
        self.state.best_metric = max(score for _, score in self.run.state.history)

    def __enter__(self) -> "CallbackRunner":
        self.notify("on_train_begin")
        return self

    def __exit__(self, error_class: type | None, *error: object) -> None:
        if error_class is None:
            self.notify("on_train_end")
