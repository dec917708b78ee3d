"""Base class for families whose library layers accept no cache and are therefore reimplemented.

The layers of DistilBERT, MPNet and ModernBERT have no argument for keys and values.
`ExplicitLayerBackbone` calls the library's layer if no keys and values are added, so that the
loop equals the library exactly. Otherwise it calls `_compute_layer`: the same layer, written
out, at the positions `x`, which attend to all positions `h`. The parity tests compare the two.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.prompt_key_values import select_position


class ExplicitLayerBackbone(Backbone):
    """Backbone whose library layers accept no cache; `_compute_layer` reimplements them."""

    def _compute_layer(
        self,
        block: Any,  # one of `layers`
        x: Tensor,  # hidden states of the positions to compute `[B,n,d]`
        h: Tensor,  # hidden states of all positions, which they attend to `[B,T,d]`
        selected: dict[str, Any],  # `layer_kwargs` at the positions of `x`
        layer_kwargs: dict[str, Any],  # keyword arguments of the library's layer
        kv: Any,  # a prompt's keys and values, or None
    ) -> Tensor:  # `[B,n,d]`
        """Compute one layer without calling the library's layer."""
        raise NotImplementedError

    def run_layer(
        self, layer: int, h: Tensor, layer_kwargs_by_type: dict[str, Any], kv: Any = None
    ) -> Tensor:
        """Run one layer: the library's own, unless a prompt adds keys and values."""
        if not kv:
            return super().run_layer(layer, h, layer_kwargs_by_type)
        layer_kwargs = layer_kwargs_by_type[self.layer_types[layer]]
        return self._compute_layer(self.layers[layer], h, h, layer_kwargs, layer_kwargs, kv)

    def run_layer_at_position(
        self,
        position: Tensor,
        layer: int,
        h: Tensor,
        layer_kwargs_by_type: dict[str, Any],
        kv: Any = None,
    ) -> Tensor:
        """Run one layer at a single position of each example."""
        layer_kwargs = layer_kwargs_by_type[self.layer_types[layer]]
        selected = {name: select_position(x, position) for name, x in layer_kwargs.items()}
        state = select_position(h, position)
        return self._compute_layer(self.layers[layer], state, h, selected, layer_kwargs, kv)

    def _attend(
        self,
        q: Tensor,  # queries `[B,heads,n,d_head]`
        k: Tensor,  # keys `[B,heads,T,d_head]`
        v: Tensor,  # values `[B,heads,T,d_head]`
        mask: Tensor | None,  # bool, or added to the scores
        kv: Any,  # a prompt's keys and values, or None
        dropout: float,  # dropout probability of the attention weights
    ) -> Tensor:  # `[B,n,d]`
        """Return the attention output of all heads, concatenated."""
        if kv:
            k, v = kv.update(k, v)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout).transpose(1, 2).flatten(2)
