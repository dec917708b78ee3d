"""A batch: tensors by name, and what must be known of them outside of the tensors.

Shapes and masks depend on the lengths of the texts. On a GPU, reading a value of a tensor waits for
all work before it, so the lengths are read and checked once, where a batch is made: `collate` knows
them, and `Batch.from_tensors` reads them from tensors. A training step reads none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from idp_tutorial.utils.checks import UserError

# fields on which the lengths depend
_MEASURED_FIELDS = ("attention_mask", "answer_start", "start_layer")


class Batch(dict[str, Any]):
    """Dictionary of tensors that knows the lengths of its texts.

    A changed copy as a plain dictionary does not know them, and is read and checked again.
    """

    def __init__(
        self,
        # `input_ids`, `attention_mask`, `token_type_ids` `[B,T]`, padded on the right; with a
        # template `mask_position` `[B]`; with a target text `answer_start` `[B]`; from a cache
        # `hidden_states` `[B,T,d]` and `start_layer` `[B]`
        tensors: Mapping[str, Any],
        lengths: Sequence[int] | None = None,  # tokens of each example; None: not known
        answer_starts: Sequence[int] | None = None,  # `answer_start`; None: no target text
        start_layer: int | None = None,  # layers that the cached states have passed; None: no cache
    ) -> None:
        super().__init__(tensors)
        self.lengths = lengths
        self.answer_starts = answer_starts
        self.start_layer = start_layer
        self._targets: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Any],  # fields as for `Batch`
    ) -> "Batch":
        """Return a batch whose lengths are known; read them from the tensors if they are not.

        A compiled or exported graph cannot depend on the values of its input: there they stay
        unknown. Raises: `UserError` for padding that is not on the right.
        """
        if isinstance(tensors, cls) and tensors.lengths is not None:
            return tensors
        if torch.compiler.is_compiling():
            return cls(tensors)
        mask = tensors["attention_mask"].long()
        is_right_padded = mask[:, 0].all() & (mask.diff(dim=1) <= 0).all()
        is_valid, *lengths = torch.cat([is_right_padded[None].long(), mask.sum(1)]).tolist()
        if not is_valid:
            raise UserError(
                "an example begins with padding, or has padding between its tokens: pad on the "
                "right (padding_side='right', or `collate`), after at least one token."
            )
        answer_starts = tensors["answer_start"].tolist() if "answer_start" in tensors else None
        if answer_starts and min(answer_starts) < 1:
            raise UserError("answer_start must be at least 1: a token of the text.")
        if "start_layer" in tensors and "hidden_states" not in tensors:
            raise UserError("start_layer needs hidden_states, the states after that many layers.")
        start_layer = int(tensors["start_layer"][0]) if "start_layer" in tensors else None
        return cls(tensors, lengths, answer_starts, start_layer)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in _MEASURED_FIELDS:
            self.lengths = None
        super().__setitem__(name, value)

    def update(self, *tensors: Any, **named: Any) -> None:
        """Set tensors, as a dictionary does; the lengths are read again if they may differ."""
        for name, value in dict(*tensors, **named).items():
            self[name] = value

    def __ior__(self, tensors: Mapping[str, Any]) -> "Batch":  # type: ignore[override,misc]
        self.update(tensors)
        return self

    def __or__(self, tensors: Mapping[str, Any]) -> "Batch":  # type: ignore[override]
        new = self._with(tensors)
        if not tensors.keys().isdisjoint(_MEASURED_FIELDS):
            new.lengths = None
        return new

    def _with(self, tensors: Mapping[str, Any]) -> "Batch":
        """Return a batch with other tensors, of texts of the same lengths."""
        new = Batch({**self, **tensors}, None, self.answer_starts, self.start_layer)
        new.lengths = self.lengths
        new._targets = self._targets
        return new

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device."""
        new = self._with({name: tensor.to(device) for name, tensor in self.items()})
        if self._targets is not None:
            rows, columns = self._targets
            new._targets = rows.to(device), columns.to(device)
        return new

    @property
    def has_padding(self) -> bool:
        """True if an example may be shorter than the batch; always in a graph."""
        if self.lengths is None or torch.compiler.is_compiling():
            return True
        return min(self.lengths) < self["input_ids"].shape[1]

    def find_targets(self) -> tuple[Tensor, Tensor] | None:
        """Return example and position `[N]` of each target token; None if an example has none.

        They are kept, and so are at hand on the device to which the batch is moved.
        """
        if self._targets is None:
            pairs = zip(self.answer_starts or (), self.lengths or ())
            ranges = [range(start, end) for start, end in pairs]
            if ranges and all(ranges):
                index = [(i, j) for i, positions in enumerate(ranges) for j in positions]
                rows, columns = torch.tensor(index, device=self["input_ids"].device).T
                self._targets = rows, columns
        return self._targets

    def without_answers(
        self,
        text_mask: Tensor,  # 1 = token of the text `[B,T]`
    ) -> "Batch":
        """Return the batch of the texts alone, in which the target texts are padding."""
        lengths = None if self.lengths is None else self.answer_starts or self.lengths
        return Batch({**self, "attention_mask": text_mask}, lengths, None, self.start_layer)


def require(
    condition: Tensor,  # bool, of any shape
    message: str,  # with `{}` for each of the values
    *values: Tensor,  # what the message shows
) -> None:
    """Raise `UserError` unless a condition on values of tensors holds, without reading them.

    On a GPU, the process ends with an assertion some time later. A graph has no such check.
    """
    if torch.compiler.is_compiling():
        return
    try:
        torch._assert_async(condition.all(), f"{message} (The values are shown on a CPU.)")
    except RuntimeError:
        raise UserError(message.format(*(value.tolist() for value in values))) from None
