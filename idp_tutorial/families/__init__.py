"""One module a family of Hugging Face models: how to embed, mask and run a layer.

Importing the package registers all families in `FAMILIES`. A class declares what its family
supports; `testing.parity` compares it with the library's own forward pass. Begin with
`families.family`.
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
