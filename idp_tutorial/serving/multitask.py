"""One frozen backbone with a prompt and a head for each of several tasks, and its file on disk.

Prompt tuning "facilitates mixed-task inference" (LPT, §1): the model in memory is the same for
all tasks, and only a few prompt vectors differ. Examples of ten tasks can share one queue and
one batch. With fine-tuned weights this is not possible, because each task has its own.
(Adapters and LoRA could be mixed with more work; this implementation refuses them.)

Prompts differ in length, depth and kind: one task inserts ten vectors among the words, the next
adds keys to every layer, a third inserts five vectors in a middle layer. `run_joint_batch`
handles that; `MultiTaskModel` makes a model of it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import Context
from idp_tutorial.core.prompted_model import PromptedModel, persistent_tensors, restore_state
from idp_tutorial.core.random_numbers import preserved_random_numbers
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.task import Task, scale_labels
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.saving.descriptions import (
    SAVE_FORMAT,
    SavedTasks,
    check_save_format,
    describe_backbone,
    describe_run,
    have_same_shapes,
    load_saved_backbone,
    parse_saved_run,
    remember_local_backbone,
)
from idp_tutorial.saving.hub import SavedPrompts, read_saved_prompts
from idp_tutorial.saving.prompt_files import build_saved_model, rebuild_model, word_vectors_digest
from idp_tutorial.serving.joint_batch import (
    refuse_changed_weights,
    run_joint_batch,
    validate_shared_backbone,
)
from idp_tutorial.training.evaluation import batch_by_length, format_predictions
from idp_tutorial.training.examples import encode_rows, select_template, validate_inference_row
from idp_tutorial.utils.checks import MissingFileError, UserError, check_at_least, check_name
from idp_tutorial.utils.records import collect_versions
from idp_tutorial.utils.tensor_files import deserialise_tensors, save_tensors

__all__ = [
    "TASKS_FILE",
    "TaskModel",
    "MultiTaskModel",
    "save_multitask_model",
    "load_multitask_model",
]


class TaskModel(NamedTuple):
    """A trained model of one task, with the task and the config that built it."""

    model: PromptedModel  # prompt and head; all tasks of a `MultiTaskModel` share the backbone
    task: Task  # labels, template and label words
    cfg: RunConfig  # the config that `build_model` was called with


def _escape_dots(name: str) -> str:
    """Replace the dots of a task's name, because dots separate the parts of a tensor's name."""
    return name.replace(".", "\u2024")


class _AnyNameModuleDict(nn.ModuleDict):
    """A dictionary of modules with any names.

    `nn.ModuleDict` refuses dots, and the names of its own attributes, because it stores modules
    as attributes. This one stores them as items only.
    """

    # an attribute such as `training` may have the name of a task
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Store a module under a name that may contain dots."""
        modules: dict[str, Any] = self._modules
        modules[_escape_dots(name)] = module

    def __getitem__(self, name: str) -> Any:
        return self._modules[_escape_dots(name)]


def _read_by_name(folders: Sequence[Path | str] | dict[str, Path | str]) -> dict[str, SavedPrompts]:
    """Read saved models, by the name of their task; those of equal tasks by the name of folder."""
    if isinstance(folders, dict):
        return {name: read_saved_prompts(folder) for name, folder in folders.items()}
    models = [read_saved_prompts(folder) for folder in folders]
    task_names = [saved.description["task"]["name"] for saved in models]
    named = {
        name if task_names.count(name) == 1 else Path(str(saved.source)).name: saved
        for name, saved in zip(task_names, models)
    }
    if len(named) < len(folders):
        raise UserError(
            f"two of the folders {', '.join(map(str, folders))} have the same name. Give a "
            "dictionary, {name: folder}."
        )
    return named


class MultiTaskModel(nn.Module):
    """A frozen backbone with a prompt and a head for each of several tasks (LPT, §1).

    The rows of a batch may belong to different tasks.
    """

    def __init__(
        self,
        task_models: dict[str, TaskModel],  # by name; all models have the same backbone object
    ):
        super().__init__()
        validate_shared_backbone(task_models)
        self.task_models = dict(task_models)
        self.task_names = list(task_models)
        self.backbone: Backbone = task_models[self.task_names[0]].model.backbone
        self.lm = self.backbone.model
        self.tasks = _AnyNameModuleDict(
            {
                name: nn.ModuleDict(dict(sources=m.model.sources, head=m.model.head))
                for name, m in task_models.items()
            }
        )

    def encode(
        self,
        # each with `task`, `sentence1`, for a pair `sentence2`, and for training `label`, an index
        # or a name
        rows: list[dict],
    ) -> dict[str, Tensor]:
        """Return a batch of rows of any tasks, in any order."""
        examples = self._encode_rows_by_task(rows)
        if len({"label" in example for example in examples}) > 1:
            raise UserError(
                "some rows have a label and others do not. Give labels for all or none."
            )
        return self._collate_examples(examples)

    def _encode_rows_by_task(self, rows: list[dict]) -> list[dict]:
        """Return one example per row; the rows of a task are encoded together."""
        if not rows:
            raise UserError(
                "there are no rows to predict. Give at least one, such as "
                "{'task': …, 'sentence1': …}."
            )
        groups: dict[str, dict[int, dict]] = {}  # task → index of a row: columns that it reads
        for i, row in enumerate(rows):
            if not isinstance(row, dict):
                raise UserError(
                    f"row {i}: {row!r:.60} is not a row. Give dictionaries such as "
                    "{'task': …, 'sentence1': …}."
                )
            name = check_name(str(row.get("task")), self.task_names, f"task in row {i}:")
            columns = validate_inference_row(self.task_models[name].task, row, f"row {i}")
            groups.setdefault(name, {})[i] = columns
        examples: list[dict] = [{} for _ in rows]
        for name, group in groups.items():
            m = self.task_models[name]
            if m.task.multi_label and any("label" in row for row in group.values()):
                raise UserError(
                    f"rows of task {name!r} may have several labels, and such a task can be "
                    "trained only by itself: leave the labels out, or train it with `fit`."
                )
            template = select_template(m.model, m.cfg)
            encoded = encode_rows(
                m.task, list(group.values()), self.backbone, m.cfg.max_len, template
            )
            for i, example in zip(group, encoded):
                examples[i] = dict(
                    input_ids=example["input_ids"],
                    token_type_ids=example["token_type_ids"],
                    mask_position=example.get("mask_position", -1),
                    task=self.task_names.index(name),
                )
                if "label" in example:
                    examples[i]["label"] = float(example["label"])
        return examples

    def _collate_examples(self, examples: list[dict]) -> dict[str, Tensor]:
        task_indices = torch.tensor([example["task"] for example in examples])
        batch = collate(examples, self.backbone.pad_id)
        return {**batch, "task": task_indices}

    def run_tasks(
        self,
        batch: dict[str, Tensor],  # from `encode`
    ) -> list[tuple[str, Tensor, Tensor | None, Context]]:
        """Run all tasks of a batch together.

        Return for each task its name, the positions of its rows in the batch `[n]`, their labels
        `[n]` or None, and the `Context` with their final hidden states.
        """
        parts = []
        for i, name in enumerate(self.task_names):
            indices = (batch["task"] == i).nonzero()[:, 0]
            if len(indices):
                parts.append((name, indices, *self._select_task_batch(name, batch, indices)))
        if sum(len(indices) for _, indices, _, _ in parts) < len(batch["input_ids"]):
            raise UserError(
                f"the batch has the task indices {sorted(set(batch['task'].tolist()))}, but this "
                f"model has tasks 0 to {len(self.task_names) - 1}. Make the batch with `encode`."
            )
        plans = [self.task_models[name].model.plan for name, _, _, _ in parts]
        contexts = run_joint_batch(self.backbone, [task_batch for *_, task_batch in parts], plans)
        return [(*part[:3], ctx) for part, ctx in zip(parts, contexts)]

    def _select_task_batch(
        self, name: str, batch: dict[str, Tensor], indices: Tensor
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the labels and the batch of one task, cut to the length of its longest example."""
        m = self.task_models[name]
        n = int(batch["attention_mask"][indices].sum(1).max())
        task_batch = {
            k: batch[k][indices, :n] for k in ("input_ids", "attention_mask", "token_type_ids")
        }
        if m.model.head.pooling == "mask":
            task_batch["mask_position"] = batch["mask_position"][indices]
        if "label" not in batch:
            return None, task_batch
        labels = batch["label"][indices]
        return labels if m.task.is_regression else labels.long(), task_batch

    def forward(
        self,
        batch: dict[str, Tensor],  # from `encode`
    ) -> list[Tensor]:  # `[C]` for each row, C outputs of its task's head
        """Return for every row the outputs of its task's head."""
        outputs: list[Any] = [None] * len(batch["input_ids"])
        for name, indices, _, ctx in self.run_tasks(batch):
            for i, output in zip(indices.tolist(), self.tasks[name]["head"](ctx)):
                outputs[i] = output
        return outputs

    def loss(
        self,
        batch: dict[str, Tensor],  # from `encode`, with labels
    ) -> Tensor:  # scalar
        """Return the mean over all rows of their tasks' losses, to train several tasks at once."""
        if "label" not in batch:
            raise UserError("the batch has no labels to learn from. Give every row a label.")
        total: Any = 0
        for name, indices, labels, ctx in self.run_tasks(batch):
            labels = scale_labels(dict(label=labels), self.task_models[name].task)["label"]
            total = total + len(indices) * self.tasks[name]["head"].loss(ctx, labels)
        return total / len(batch["input_ids"])

    def train(self, mode: bool = True) -> "MultiTaskModel":
        """Set training mode, with dropout off below the first prompt of any task.

        If the tasks were built with `dropout_below_prompt`, dropout is on in all layers.
        """
        first = min(m.model.first_trained_layer for m in self.task_models.values())
        # the first task of each setting
        by_lower_dropout = {
            m.model.dropout_below_prompt: name for name, m in reversed(self.task_models.items())
        }
        if mode and first >= 0 and len(by_lower_dropout) > 1:
            raise UserError(
                f"{by_lower_dropout[True]!r} has dropout_below_prompt=True and "
                f"{by_lower_dropout[False]!r} has not, but the layers below their prompts run once "
                "for both. Use the same dropout_below_prompt for all tasks."
            )
        super().train(mode)
        if mode and first >= 0 and True not in by_lower_dropout:
            self.lm.eval()
            for layer in [*self.backbone.layers[first:], self.backbone.norm]:
                layer.train()
        return self

    @torch.no_grad()
    def predict(
        self,
        rows: list[dict],  # each with `task`, `sentence1`, and for a pair `sentence2`
        batch_size: int = 16,  # rows that run together; use more on a GPU
        probabilities: bool = False,  # True: return dictionaries with all probabilities
    ) -> list[Any]:  # label names, lists of them, or numbers; with `probabilities` dictionaries
        """Return the prediction for every row, as a label name or a number."""
        self.eval()
        check_at_least(batch_size, 1, "batch_size")
        examples = self._encode_rows_by_task(rows)
        indices_by_task: dict[str, list[int]] = {}
        for i, example in enumerate(examples):
            example.pop("label", None)
            indices_by_task.setdefault(self.task_names[example["task"]], []).append(i)
        lengths = [len(example["input_ids"]) for example in examples]
        outputs: list[Any] = [None] * len(rows)
        for indices in batch_by_length(lengths, batch_size):
            batch = self._collate_examples([examples[i] for i in indices])
            batch = {k: v.to(self.backbone.device) for k, v in batch.items()}
            for i, output in zip(indices, self(batch)):
                outputs[i] = output.float().cpu()
        predictions: list[Any] = [None] * len(rows)
        for name, indices in indices_by_task.items():
            formatted = format_predictions(
                self.task_models[name].task,
                torch.stack([outputs[i] for i in indices]),
                [rows[i].get("group") for i in indices],
            )
            for i, prediction in zip(indices, formatted):
                predictions[i] = prediction
        if probabilities:
            return predictions
        return [p.get("label", p.get("value")) for p in predictions]

    @classmethod
    def from_pretrained(
        cls,
        # saved models or repositories on the Hub, which are named by their tasks (and those of one
        # task by the last part of their path); or a dictionary, name → folder
        folders: Sequence[Path | str] | dict[str, Path | str],
        bb: Backbone | Path | str | None = None,  # None: the backbone that the first model names
        glove: Path | str | None = None,  # GloVe vectors, if a model was trained with a file
    ) -> "MultiTaskModel":  # in evaluation mode
        """Load several saved models onto one backbone."""
        task_models = {}
        for name, saved in _read_by_name(folders).items():
            method = check_name(saved.description["cfg"].get("method", ""), METHODS, "method")
            if METHODS[method].insertion_point.endswith("weights"):
                refuse_changed_weights(name, method)
            has_glove = "glove" in METHODS[method].options
            model, task, cfg = build_saved_model(saved, bb, glove if has_glove else None)
            task_models[name] = TaskModel(model, task, cfg)
            bb = model.backbone
        return cls(task_models).eval()

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return the trainable parameters of all tasks by name."""
        return {n: p for n, p in self.tasks.named_parameters() if p.requires_grad}


TASKS_FILE = "tasks.safetensors"


def _has_same_structure(model: MultiTaskModel, rebuilt: MultiTaskModel, name: str) -> bool:
    """Return whether two models of a task have equal plans, kinds of heads and shapes."""
    kinds = []
    for m in (model.task_models[name].model, rebuilt.task_models[name].model):
        kinds.append((type(m.head), [(layer, type(step)) for layer, step in m.plan.items()]))
    tensors = persistent_tensors(model.tasks[name])
    rebuilt_tensors = persistent_tensors(rebuilt.tasks[name])
    return kinds[0] == kinds[1] and have_same_shapes(tensors, rebuilt_tensors)


def _find_mismatched_tasks(model: MultiTaskModel, rebuilt: MultiTaskModel) -> set[str]:
    """Return the tasks whose outputs differ although `rebuilt` has the same tensors."""
    device = model.backbone.device
    modes = [(module, module.training) for module in model.modules()]
    restore_state(persistent_tensors(rebuilt.to(device).tasks), persistent_tensors(model.tasks))
    rows = [
        {"task": name, "group": 0, **dict.fromkeys(m.task.text_columns, "it was here")}
        for name, m in model.task_models.items()
    ]
    batch = {k: v.to(device) for k, v in model.encode(rows).items()}
    with torch.no_grad():
        outputs = model.eval()(batch)
        rebuilt_outputs = rebuilt.eval()(batch)
    for module, mode in modes:
        module.training = mode
    return {
        name
        for name, a, b in zip(model.task_models, outputs, rebuilt_outputs)
        if not torch.allclose(a, b, atol=1e-4, equal_nan=True)
    }


def _check_can_be_rebuilt(model: MultiTaskModel) -> None:
    """Check that each task's config and task build its model again."""
    with preserved_random_numbers():
        rebuilt = MultiTaskModel(
            {
                name: m._replace(
                    model=build_model(replace(m.cfg, init_from=None), model.backbone, m.task)
                )
                for name, m in model.task_models.items()
            }
        )
    names = model.task_names
    mismatched = {name for name in names if not _has_same_structure(model, rebuilt, name)}
    mismatched = mismatched or _find_mismatched_tasks(model, rebuilt)
    for name, m in model.task_models.items():
        if name in mismatched:
            raise UserError(
                f"{name!r} is not what its config builds ({m.cfg.method}, "
                f"prompt_length={m.cfg.get('prompt_length')}), so it could not be loaded again. "
                "Give TaskModel the RunConfig and the Task that build_model was called with."
            )


def save_multitask_model(
    model: MultiTaskModel,
    folder: Path | str,  # created; it must not contain a saved multi-task model
) -> None:
    """Save the prompts and heads of all tasks to one file, written completely or not at all.

    Raises: `UserError` if a task could not be loaded again.
    """
    folder = Path(folder)
    bb = model.backbone
    if (folder / TASKS_FILE).exists():
        raise UserError(f"{folder} already holds a model. Give another folder, or delete this one.")
    _check_can_be_rebuilt(model)
    description: dict[str, Any] = dict(
        format=SAVE_FORMAT,
        version=collect_versions()["idp_tutorial"],
        backbone=describe_backbone(bb, bb.name),
        members={
            name: {**describe_run(m.task, m.cfg), "glove": word_vectors_digest(m.model)}
            for name, m in model.task_models.items()
        },
    )
    save_tensors(folder / TASKS_FILE, persistent_tensors(model.tasks), description)
    remember_local_backbone(description["backbone"], bb.name)


def _read_tasks_file(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the tensors of a saved multi-task model."""
    file = folder / TASKS_FILE
    if not file.is_file():
        raise MissingFileError(
            f"there is no {TASKS_FILE} in {folder}. Give a folder that `save_multitask_model` made."
        )
    description, tensors = deserialise_tensors(file.read_bytes(), file)
    check_save_format(description, file, SavedTasks)
    if not description["members"]:
        raise UserError(f"{file} has no tasks: save the model again.")
    return description, tensors


def load_multitask_model(
    folder: Path | str,  # written by `save_multitask_model`
    # the backbone that the tasks were trained on, or its folder; None: loaded by its name
    bb: Backbone | Path | str | None = None,
    glove: Path | str | None = None,  # GloVe vectors, if a task was trained with a file
) -> MultiTaskModel:  # in evaluation mode
    """Load a model that `save_multitask_model` saved.

    Raises: `UserError` for a damaged file and for another backbone, and `MissingFileError` for a
    folder without a saved model.
    """
    folder = Path(folder)
    description, tensors = _read_tasks_file(folder)
    descriptions = description["members"]
    runs = {
        name: parse_saved_run(saved, folder, description["version"], tensors)
        for name, saved in descriptions.items()
    }
    backbone_name = next(iter(runs.values()))[1].backbone
    backbone = load_saved_backbone(
        description["backbone"], backbone_name, bb, f"the tasks of {folder}"
    )
    with preserved_random_numbers():
        model = MultiTaskModel(
            {
                name: TaskModel(
                    rebuild_model(descriptions[name], task, cfg, backbone, glove, folder), task, cfg
                )
                for name, (task, cfg) in runs.items()
            }
        )
    model_tensors = persistent_tensors(model.tasks)
    if not have_same_shapes(model_tensors, tensors):
        raise UserError(
            f"the tensors in {folder} do not match the models that its configs describe. The file "
            "is damaged or of another version: save the model again."
        )
    restore_state(model_tensors, tensors)
    return model.eval()
