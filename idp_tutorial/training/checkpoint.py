"""Checkpoints of training runs, from which a killed run resumes as if it had not been stopped.

Cluster jobs are killed: the time limit is reached, another job has priority, a disk is full. A
run that starts from the beginning each time may never finish. `fit(…, checkpoint_dir='folder')`
therefore writes checkpoints, and the same call resumes from them.

Resuming with other texts, another learning rate or another backbone would give a score that
belongs to no config. A checkpoint therefore contains the fingerprint of its run: the config,
the identity of the backbone before training, and digests of the encoded examples, of frozen
weights of the head, and of word vectors and initial prompts, where there are any. Paths and the
device are not part of it.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from idp_tutorial.core.backbone import backbone_id
from idp_tutorial.core.devices import GPU_TYPES, gpu_random_states, set_gpu_random_states
from idp_tutorial.core.planned_model import PlannedModel, restore_state
from idp_tutorial.training.config import TrainingConfig
from idp_tutorial.training.distributed import (
    StepMeasurements,
    all_gather_objects,
    gather_results,
)
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.digests import compute_digest, file_digest
from idp_tutorial.utils.records import config_fingerprint, describe_differences
from idp_tutorial.utils.schemas import Count, check_schema, check_structure
from idp_tutorial.utils.tensor_files import (
    PROMPTS_FILE,
    read_last_snapshot,
    write_snapshot,
)

# training can change the backbone of a model, which may be interrupted and then resumed
_initial_ids: WeakKeyDictionary[PlannedModel, str] = WeakKeyDictionary()


def _initial_backbone_id(model: PlannedModel) -> str:
    """Return the `backbone_id` of the first call, which comes before any training."""
    if model not in _initial_ids:
        _initial_ids[model] = backbone_id(model.backbone)
    return _initial_ids[model]


def _iterate_frozen_weights(model: PlannedModel) -> Iterator[bytes | np.ndarray]:
    """Yield name and bytes of each parameter outside the backbone that is not trained."""
    trained = model.trained_parameters()
    in_backbone = set(model.backbone.base.parameters())
    for name, tensor in model.named_parameters():
        if name not in trained and tensor not in in_backbone:
            yield name.encode()
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def run_fingerprint(
    model: PlannedModel,  # before training
    splits: Sequence[Sequence[dict]],  # encoded examples of training and validation
    cfg: TrainingConfig,
    lr: float,  # learning rate of the run
    num_processes: int = 1,  # each process draws its own dropout
) -> dict:
    """Return the settings and digests that must match before a run resumes from a checkpoint."""
    inputs = []
    for examples in splits:
        inputs.append(json.dumps([[e["input_ids"], e.get("label")] for e in examples]).encode())
    digests = [source.state_digest() for source in model.prompt_sources()]
    word_vector_digests = [digest for digest in digests if digest is not None]
    initial_prompts = cfg.init_from and file_digest(Path(cfg.init_from) / PROMPTS_FILE)[:16]
    return {
        **config_fingerprint(cfg),
        "lr": lr,
        "processes": num_processes,
        "examples": compute_digest(inputs),
        "backbone": _initial_backbone_id(model),
        "other frozen weights": compute_digest(_iterate_frozen_weights(model)),
        "word vectors": word_vector_digests,
        "initial prompts": initial_prompts,
    }


def get_random_state() -> dict:
    """Return the states of all random generators of this process: PyTorch, GPU, Python, NumPy."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    return dict(
        torch=torch.get_rng_state(),
        **{"cuda": None, **gpu_random_states()},
        python=random.getstate(),
        numpy=(name, keys.tolist(), *rest),
    )


def set_random_state(state: dict) -> None:
    """Restore the states that `get_random_state` returned."""
    name, keys, *rest = state["numpy"]
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    set_gpu_random_states({name: state.get(name) for name in GPU_TYPES})


def _stateful_parts(run: Any) -> dict[str, Any]:
    """Return the parts of a run with a state of their own, by name; None: the run has none."""
    return dict(optimizer=run.optimizer, lr_scheduler=run.lr_scheduler, grad_scaler=run.acc.scaler)


_CONTENT_KEYS = ("fingerprint", "progress", "random_states", "tensors")  # of every checkpoint
_REMEDY = "delete its checkpoints to start this run again"


@dataclass
class _SavedProgress:
    """Schema of a saved `TrainState`."""

    step: Count
    best_tensors: dict[str, Tensor] | None
    history: list[tuple[int, float]]
    validation_losses: list[float | None]
    losses: Tensor
    is_ended: bool


@dataclass
class _SavedContent:
    """Schema of a checkpoint."""

    fingerprint: dict[str, Any]
    progress: _SavedProgress
    profiler: StepMeasurements
    random_states: list[dict[str, Any]]
    tensors: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    lr_scheduler: dict[str, Any] | None
    grad_scaler: dict[str, Any] | None
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)  # older ones have none


@dataclass
class _SavedOptimizer:
    """Schema of the state of an optimizer of PyTorch."""

    state: dict[int, dict[str, Tensor | float | None]]
    param_groups: list[dict[str, Any]]


def check_optimizer_state(
    saved: Any,  # what was read from a file
    optimizer: Any,  # optimizer of PyTorch, or of Accelerate, that will get it
    source: Any,  # name of the file, for messages
    remedy: str = _REMEDY,  # what usually fixes it, for messages
) -> None:
    """Check that the state of an optimizer has its groups, and moments of its parameters' shapes.

    Raises: `UserError` if it does not.
    """
    check_schema(_SavedOptimizer, saved, source, remedy)
    groups = optimizer.state_dict()["param_groups"]
    check_structure(saved["param_groups"], groups, f"{source}, optimizer,", remedy)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, moments in saved["state"].items():
        shapes = {(), tuple(parameters[i].shape)} if 0 <= i < len(parameters) else set()
        tensors = [m for m in moments.values() if isinstance(m, Tensor)]
        if not shapes or not all(tuple(t.shape) in shapes for t in tensors):
            raise UserError(f"{source} has moments of another shape for parameter {i}: {remedy}.")


def _check_content(content: Mapping[str, Any], run: Any, source: str) -> None:
    """Check the content of a checkpoint against the run that continues from it."""
    trained = dict(run.trained_tensors)
    best = content["progress"]["best_tensors"]
    for tensors in (content["tensors"], best):
        if tensors:
            check_structure(tensors, trained, source, _REMEDY)
    for name, part in _stateful_parts(run).items():
        if not content[name] or part is None:
            continue
        if name == "optimizer":
            check_optimizer_state(content[name], part, source)
        else:
            check_structure(content[name], part.state_dict(), f"{source}, {name},", _REMEDY)
    states = content["random_states"]
    if len(states) <= run.acc.process_index:
        raise UserError(f"{source} has random states of {len(states)} processes only: {_REMEDY}.")
    example = get_random_state()
    saved = states[run.acc.process_index]
    for name in GPU_TYPES:  # the checkpoint may be of another device
        example.pop(name, None)
        example |= {name: saved[name]} if name in saved else {}
    check_structure(saved, example, f"{source}, random_states,", _REMEDY)


class Checkpoint:
    """Folder with the last two checkpoints of a run, `checkpoint-STEP.safetensors`."""

    def __init__(
        self,
        folder: Path | str,  # created if needed; a folder for each run
        run_fingerprint: dict,  # from `run_fingerprint`
        interval: int,  # steps between two checkpoints; the last step is always saved
    ) -> None:
        self.folder = Path(folder)
        self.run_fingerprint = run_fingerprint
        self.interval = interval
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(
        self,
        run: Any,  # a `TrainingRun`
    ) -> None:
        """Write the state of a run; once it is finished, only its best tensors and its log."""
        random_states = all_gather_objects(get_random_state())
        if not run.acc.is_main_process:
            return

        is_finished = run.is_finished
        tensors = {} if is_finished else {n: t.detach() for n, t in run.trained_tensors.items()}
        states = {
            name: None if is_finished or part is None else part.state_dict()
            for name, part in _stateful_parts(run).items()
        }
        content = dict(
            fingerprint=self.run_fingerprint,
            progress={**vars(run.state), "losses": torch.stack(run.state.losses)},
            profiler=run.profiler.state_dict(),
            random_states=random_states,
            callbacks=run.callbacks.state_dict(),
            tensors=tensors,
            **states,
        )
        write_snapshot(self.folder, run.state.step, content)

    def load(
        self,
        run: Any,  # a `TrainingRun`
    ) -> None:
        """Restore a run from the last checkpoint; without one, leave it unchanged."""
        content = self._read_on_all_processes(run.acc)
        if content is None:
            return
        source = f"the checkpoint in {self.folder}"
        _check_content(content, run, source)
        restore_state(run.trained_tensors, content["tensors"])
        for name, part in _stateful_parts(run).items():
            if content[name]:
                part.load_state_dict(content[name])
        run.profiler.load_state_dict(content["profiler"])
        run.saved_callbacks = content.get("callbacks", {})
        progress = dict(content["progress"])
        progress["losses"] = list(progress["losses"].to(run.acc.device))
        vars(run.state).update(progress)
        try:
            set_random_state(content["random_states"][run.acc.process_index])
        except (TypeError, ValueError, OverflowError, RuntimeError) as e:
            raise UserError(
                f"{source} has a state of a random generator that cannot be used: {_REMEDY}."
            ) from e

    def _read_on_all_processes(self, acc: Any) -> dict | None:
        """Read on every process; an error of one process is raised on all, so that none waits."""
        if acc.distributed_type == "FSDP":
            raise UserError(
                "checkpoints are not supported with FSDP, where no process holds a whole tensor: "
                "use DDP, or save_every=0."
            )
        content: dict | None = None

        def read_step() -> int:
            """Read the checkpoint of this process, and return its step."""
            nonlocal content
            content = self.read()
            return content["progress"]["step"] if content else 0

        steps = gather_results(read_step)
        if len(set(steps)) > 1:
            raise UserError(
                f"the processes read different checkpoints from {self.folder} (steps {steps}). "
                "All machines need the same shared folder."
            )
        return content

    def read(self) -> dict | None:
        """Return the content of the last checkpoint, or None without a checkpoint.

        Raises: `UserError` if the checkpoint belongs to another run or cannot be read.
        """
        content = read_last_snapshot(self.folder, _CONTENT_KEYS)
        if content is None:
            return None
        check_schema(_SavedContent, content, f"the checkpoint in {self.folder}", _REMEDY)
        saved = content["fingerprint"]
        current = self.run_fingerprint
        if "backbone weights" in saved:  # of an earlier version, whose digests cannot be checked
            shared = saved.keys() & current.keys()
            saved = {name: saved[name] for name in shared}
            current = {name: current[name] for name in shared}
        differences = describe_differences(saved, current)
        if differences:
            raise UserError(
                f"{self.folder} holds another run ({differences}). Use another folder "
                "or the same settings, or delete its checkpoints to start from the beginning."
            )
        return content
