"""Import, and thereby register, all supported model families.

Importing this module registers all families. Their classes declare what each supports:

Small models with random weights, one of each family; their attention windows are shorter than
the texts, and their heads are not always `d/n` wide. Each number is the largest absolute
difference. The first seven comparisons are with the library, and should be 0: a batch with
padding, one without, one of single tokens; training mode with the same random numbers; the
language-model head; a prompt among the words, compared with the library's `inputs_embeds`; for
decoders, keys and values, compared with its `past_key_values`. The last four compare two ways
to compute the same in this implementation, which differ by rounding: label words only, the last
layer at one position, a text alone or in a batch, prompts of several lengths in one batch.
"""

from idp_tutorial.families import deberta as family_deberta
from idp_tutorial.families import distilbert as family_distilbert
from idp_tutorial.families import electra as family_electra
from idp_tutorial.families import gpt2 as family_gpt2
from idp_tutorial.families import llama as family_llama
from idp_tutorial.families import modernbert as family_modernbert
from idp_tutorial.families import mpnet as family_mpnet
from idp_tutorial.families import roberta as family_roberta
from idp_tutorial.families import t5 as family_t5
from idp_tutorial.families.family import (
    FAMILIES,
    Family,
    build_hf_model,
    get_auto_class,
    get_family,
    register_family,
    resolve_attention,
    wrap_hf_model,
)
