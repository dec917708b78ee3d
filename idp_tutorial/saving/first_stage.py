"""Start a run from the prompts that an earlier run trained.

A run can start from the prompts of another task, as IDPG does with MNLI (supplementary
training). With `init_from=folder` they are copied before training, together with the statistics
of `RunningStandardiser` if the generator reads standardised vectors. A head is copied only if
it has the same shape, as in fairseq: a head for three classes cannot be used for two.
"""

from pathlib import Path

from torch import Tensor

from idp_tutorial.core.prompted_model import PromptedModel, restore_state, trained_state
from idp_tutorial.saving.descriptions import PROMPTS_FILE, read_prompts
from idp_tutorial.utils.checks import MissingFileError, UserError

__all__ = ["load_first_stage"]


def _first_shape_mismatch(
    saved_tensors: dict[str, Tensor], model_tensors: dict[str, Tensor]
) -> str | None:
    """Describe the first prompt tensor whose shape differs; return None if all are equal."""

    def shape(tensors: dict[str, Tensor], name: str) -> str:
        """Return the shape of a tensor as text."""
        if name not in tensors:
            return "missing"
        kind = "" if tensors[name].is_floating_point() else f" of {tensors[name].dtype}"
        return f"{tuple(tensors[name].shape)}{kind}"

    for name in sorted({*saved_tensors, *model_tensors}):
        saved_shape = shape(saved_tensors, name)
        model_shape = shape(model_tensors, name)
        if not name.startswith("head.") and saved_shape != model_shape:
            return f"{name} is {saved_shape} in the folder and {model_shape} in the model"
    return None


def load_first_stage(
    model: PromptedModel,  # model of the second stage, which is changed in place
    folder: Path | str,  # folder of the first stage
    include_head: bool = True,  # copy the head too, if its shape fits
) -> list[str]:  # names of the tensors that were copied
    """Initialise a model with the trained prompts of an earlier stage.

    Raises: `MissingFileError` if the folder has no prompts, `UserError` if they have other shapes.
    """
    if not (Path(folder) / PROMPTS_FILE).is_file():
        raise MissingFileError(
            f"init_from={str(folder)!r} has no {PROMPTS_FILE}: give a folder that "
            "`run_supplementary_training` wrote."
        )
    _, saved_tensors = read_prompts(folder)
    model_tensors = {
        name: tensor for name, tensor in trained_state(model).items() if not name.startswith("lm.")
    }
    if mismatch := _first_shape_mismatch(saved_tensors, model_tensors):
        raise UserError(
            f"the prompts of {folder} do not fit this model ({mismatch}): use the same method, "
            "prompt_length, bottleneck and backbone in both stages, or init_from=None."
        )
    head_names = {name for name in saved_tensors if name.startswith("head.")}
    head_fits = include_head and all(
        name in model_tensors and model_tensors[name].shape == saved_tensors[name].shape
        for name in head_names
    )
    copied = sorted(name for name in saved_tensors if head_fits or name not in head_names)
    restore_state(model_tensors, {name: saved_tensors[name] for name in copied})
    return copied
