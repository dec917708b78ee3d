"""Methods of parameter-efficient training: IDPG, LPT, ID-SPAM and their baselines.

The package contains the prompt sources and plans of the methods, changes of the backbone such as
LoRA and adapters, and the registry `METHODS`.

Modules:

- `adapters`: Adapters, Compacter and LoRA: small trainable layers that can be added and removed.
- `all_methods`: All methods of the three papers and their baselines, in the order of the tables.
- `backbone_edits`: Change a backbone for a method that trains weights inside it, and restore it
  afterwards.
- `bottleneck_generator`: IDPG: a small network generates the prompt from the frozen model's
  sentence vector.
- `cartridge`: Cartridge: keys and values of every layer as parameters, initialised from a text.
- `efl`: The EFL baseline: predict whether the description of each label follows from the text.
- `glove`: IDPG's light encoder: the mean GloVe vector of the words of a text.
- `id_spam`: ID-SPAM: weight the words by attention, and generate the prompt from their weighted
  mean.
- `idpg`: S-IDPG: its generator with the choices of paper and code, its plan, and its options.
- `idpg_multilayer`: A generated prompt in every layer: what is shared, what is read, and how
  prompts enter.
- `key_value_prompt`: A prompt for each layer, static or generated: as keys and values, in place of
  states, or added.
- `lpt`: Late prompt tuning: insert the prompt half-way, generated from the hidden states there.
- `method_registry`: The registry `METHODS`: what a method is, its options, and facts such as its
  learning rates.
- `npg`: NPG of late prompt tuning: let the prompt enter half-way, and generate it from a hidden
  state there.
- `p_tuning`: `ReparameterizedPrompt`: a static prompt that a small network computes from a trained
  table.
- `p_tuning_v2`: P-tuning v2: a trainable prompt for every layer, inserted in three different ways.
- `phm`: PHM layers that build their matrix only where that costs fewer multiplications.
- `phm_layer`: PHM layers: linear layers whose matrix is a sum of `n` Kronecker products, with about
  1/n of the parameters.
- `prompt_tuning`: Where a prompt at the input enters, and the options of prompt tuning.
- `sentence_vectors`: Sentence vectors M(x) and token vectors: the inputs from which a generator
  computes a prompt.
- `shadow`: Shadow: a small network beside the frozen model corrects the hidden states of every
  layer.
- `smop_dept`: SMoP, which selects one of several prompts, and DePT, which also updates word
  vectors.
- `soft_prompt`: Prompt tuning: trainable prompt vectors in front of the input, the same for every
  example.
- `text_init`: Initialise a static prompt from a text: from its word vectors, or from its keys and
  values.
- `token_attention`: ID-SPAM: attention weights the words, and a small network turns their mean into
  the prompt.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
