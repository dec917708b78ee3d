"""One module for each family of Hugging Face models: how to embed, mask and run a layer.

Importing the package registers all families in `FAMILIES`. A class declares what its family
supports; `tests/parity.py` compares it with the library's own forward pass. Begin with
`families.family`.

Modules:

- `deberta`: DeBERTa 1 to 3: separate attention to content and to relative positions.
- `distilbert`: DistilBERT: BERT without token types, and the simplest explicit layer.
- `electra`: ELECTRA: BERT's layers behind word embeddings that can be narrower than the hidden
  states.
- `explicit_layer`: Base class for families whose library layers accept no cache and are therefore
  reimplemented.
- `family`: The table of model families: the backbone class of each and the class that loads its
  weights.
- `gpt2`: GPT-2: a decoder with learnt positions, whose last token represents the text.
- `llama`: Decoders with rotary positions: Llama, Mistral, Qwen and Gemma.
- `modernbert`: ModernBERT: an encoder with rotary positions and layers with sliding-window
  attention.
- `mpnet`: MPNet: RoBERTa with a relative position bias that all layers share.
- `roberta`: BERT, RoBERTa, XLM-RoBERTa and CamemBERT, which differ in position ids and heads.
- `t5`: The encoder of T5 and FLAN-T5, with a relative position bias instead of positions.
"""

from idp_tutorial.families import (
    deberta,
    distilbert,
    electra,
    gpt2,
    llama,
    modernbert,
    mpnet,
    roberta,
    t5,
)
from idp_tutorial.families.family import (
    FAMILIES,
    Family,
    get_family,
    register_family,
    wrap_hf_model,
)

__all__ = ["FAMILIES", "Family", "get_family", "register_family", "wrap_hf_model"]
