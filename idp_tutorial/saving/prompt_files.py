"""Save the trained tensors of a model without its backbone, and load them again.

A checkpoint contains what is needed to continue training. To *use* a trained model we need
less: the best tensors, and a description from which the model can be built. That is a few
kilobytes.

`prompts.safetensors` has the tensors that training changed. Its metadata has the config and the
task, from which the model is built again; the digests of the backbone, because prompts are
useless with other weights; and for a model with GloVe vectors their digest. The file is written
under another name and then renamed, so at any moment there is a complete model. `prompts.json`
is a copy of the description for people, which is never read. `README.md` is the model card. On
the hub the folder is a repository.

A run can start from the prompts of another task, as IDPG does with MNLI (supplementary
training). With `init_from=folder` they are copied before training, together with the statistics
of `RunningStandardiser` if the generator reads standardised vectors. A head is copied only if
it has the same shape, as in fairseq: a head for three classes cannot be used for two.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from idp_tutorial.assembly.build import build_model, weights_dtype
from idp_tutorial.assembly.config import RunConfig, refuse_control
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.dtypes import DTYPES, cast_weights
from idp_tutorial.core.planned_model import PlannedModel, restore_state, trained_state
from idp_tutorial.data.task import Task
from idp_tutorial.saving.descriptions import (
    SAVE_FORMAT,
    describe_backbone,
    describe_run,
    load_saved_backbone,
    parse_saved_run,
    read_prompts,
    remember_local_backbone,
    tensor_shapes,
    write_prompts,
)
from idp_tutorial.saving.hub import RECORD_FILE, SavedPrompts, read_saved_prompts, write_model_card
from idp_tutorial.utils.checks import UserError, check_choice
from idp_tutorial.utils.durable_files import write_atomically
from idp_tutorial.utils.process import process_state
from idp_tutorial.utils.records import collect_versions, dump_record


def _describe_original_backbone(model: PlannedModel, cfg: RunConfig) -> dict[str, Any]:
    """Describe the backbone as it was before training."""
    is_changed = any(name.startswith("lm.") for name in model.trained_parameters())
    is_sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    bb = load_backbone(cfg.backbone) if is_changed or is_sharded else model.backbone
    return describe_backbone(bb, cfg.backbone)


def word_vectors_digest(
    model: PlannedModel,
) -> str | None:  # None: the model reads no word vectors
    """Return the digest of the GloVe vectors that the prompt sources of a model read."""
    digests = (source.state_digest() for source in model.prompt_sources())
    return next((digest for digest in digests if digest is not None), None)


def _gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return a whole tensor on the CPU; with FSDP a part of it is on each process."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def _source_formulas(model: PlannedModel) -> list[str]:
    """Return the docstrings of the prompt sources, each on one line and once."""
    docstrings = (type(source).__doc__ or "" for source in model.sources)
    lines = (" ".join(docstring.split()) for docstring in docstrings)
    return [line for line in dict.fromkeys(lines) if line]


def save_pretrained(
    model: PlannedModel,  # the trained model
    folder: Path | str,  # created if missing; an older model in it is replaced in one step
    task: Task,  # task of the model; its examples are not saved
    cfg: RunConfig,  # config that the model was built with
    record: dict | None = None,  # record of its run, which is saved too and used for the model card
    controls: Sequence[dict] = (),  # records of other methods on the same task, for the model card
) -> None:
    """Save the trained tensors of a model with a description from which it can be built again.

    All processes must call it; the main process writes.

    Raises: `UserError` for a control, which has no prompt.
    """
    refuse_control(cfg.method)
    folder = Path(folder)
    tensors = {name: _gather_full_tensor(tensor) for name, tensor in trained_state(model).items()}
    if not process_state().is_main_process:
        return
    description = dict(
        format=SAVE_FORMAT,
        version=collect_versions()["idp_tutorial"],
        **describe_run(task, cfg),
        backbone=_describe_original_backbone(model, cfg),
        glove=word_vectors_digest(model),
        # a later run compares them with its own, to see whether this model is its result
        digests=record and record["digests"],
        formula=_source_formulas(model),
    )
    write_prompts(folder, tensors, description)
    remember_local_backbone(description["backbone"], cfg.backbone)
    write_model_card(folder, description, record, controls=controls)
    if record:
        write_atomically(folder / RECORD_FILE, (dump_record(record) + "\n").encode())


def from_pretrained(
    folder: Path | str,  # folder of a saved model, or a repository on the hub, such as 'me/tickets'
    # backbone that it was trained on, or its folder or name; None: the name in the description
    bb: Backbone | Path | str | None = None,
    # file or folder of GloVe vectors, if it was trained with one
    glove: Path | str | None = None,
    revision: str | None = None,  # branch, tag or commit of the repository
    token: str | None = None,  # access token of the hub
    # dtype of the backbone's weights, 'float32', 'bfloat16' or 'int8' (not for methods that train
    # the backbone); None: that of training
    dtype: str | None = None,
) -> tuple[PlannedModel, Task, RunConfig]:  # the model is in eval mode
    """Load a model that `save_pretrained` wrote.

    Prompts and heads are float32 with every `dtype`.

    Raises: `MissingFileError` if there is no model, `UserError` if it is damaged or of another
    version, or if the backbone or the word vectors are not those of training.
    """
    return build_saved_model(read_saved_prompts(folder, revision, token), bb, glove, token, dtype)


def build_saved_model(
    saved: SavedPrompts,  # from `read_saved_prompts`
    bb: Backbone | Path | str | None = None,  # as for `from_pretrained`
    glove: Path | str | None = None,  # as for `from_pretrained`
    token: str | None = None,  # access token of the hub, for the backbone
    dtype: str | None = None,  # as for `from_pretrained`
) -> tuple[PlannedModel, Task, RunConfig]:  # the model is in eval mode
    """Build a saved model that is already read, and load its backbone.

    Raises: `UserError` if the backbone or the word vectors are not those of training.
    """
    folder, _, description, saved_tensors = saved
    task, cfg = parse_saved_run(description, folder, description["version"], saved_tensors)
    if dtype is not None:
        if isinstance(bb, Backbone):
            raise UserError(
                f"dtype={dtype!r} cannot be used with a backbone that is loaded already: "
                "give its name."
            )
        cfg = cfg.with_options(dtype=dtype)
    bb = load_saved_backbone(
        description["backbone"],
        cfg.backbone,
        bb,
        f"the prompts of {folder}",
        token=token,
        dtype=weights_dtype(cfg),
    )
    # only a file that the user gave is opened, never the one in the saved config
    model = build_model(cfg.with_options(glove=str(glove) if glove else None), bb, task)
    if word_vectors_digest(model) != description.get("glove"):
        raise UserError(
            f"the prompts of {folder} need other word vectors than {glove or 'the bundled ones'}: "
            f"give the path of {cfg.get('glove') or 'the file of training'} as glove=."
        )
    tensors = trained_state(model)
    if tensor_shapes(tensors) != tensor_shapes(saved_tensors):
        raise UserError(
            f"the tensors of {folder} do not fit the model that its config describes: train it "
            "again."
        )
    restore_state(tensors, saved_tensors)
    if dtype is not None and weights_dtype(cfg) != dtype:  # training needed float32
        hint = f"method {cfg.method!r} trains the backbone"
        cast_weights(model.lm, DTYPES[check_choice(dtype, DTYPES, "dtype", hint)])
    backbone = bb.name if Path(bb.name).is_dir() else cfg.backbone
    glove_path = cfg.get("glove") if glove is None else str(glove)
    return model.eval(), task, cfg.with_options(backbone=backbone, glove=glove_path)


def load_first_stage(
    model: PlannedModel,  # model of the second stage, which is changed in place
    folder: Path | str,  # folder of the first stage
) -> list[str]:  # names of the tensors that were copied
    """Initialise a model with what an earlier stage trained, and with its head if it fits.

    Raises: `MissingFileError` if the folder has no prompts, `UserError` if they have other shapes.
    """
    _, saved_tensors = read_prompts(folder)
    model_tensors = trained_state(model)
    for one, other in ((model_tensors, saved_tensors), (saved_tensors, model_tensors)):
        # supplementary training saves its backbone beside the prompts, and the model has it already
        if not any(name.startswith("lm.") for name in other):
            for name in [name for name in one if name.startswith("lm.")]:
                del one[name]
    unlike = tensor_shapes(model_tensors).items() ^ tensor_shapes(saved_tensors).items()
    unlike_names = {name for name, _ in unlike}
    if any(not name.startswith("head.") for name in unlike_names):
        raise UserError(
            f"the prompts of {folder} do not fit this model ({sorted(unlike_names)[:3]}): use the "
            "same method, prompt_length, bottleneck and backbone in both stages, or init_from=None."
        )
    head_fits = not unlike_names
    copied = sorted(name for name in saved_tensors if head_fits or not name.startswith("head."))
    restore_state(model_tensors, {name: saved_tensors[name] for name in copied})
    return copied
