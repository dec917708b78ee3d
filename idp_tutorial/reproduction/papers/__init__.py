"""The papers: their protocols, published scores and claims, and the runs that test them.

Modules:

- `claims`: A table of the papers' claims, with the verdict that the project's records give on each.
- `protocols`: Turn every cell of a published table into the config of a run, as its paper trained
  it.
- `published_scores`: The scores that the three papers print, and the command that reproduces each
  table and figure.
- `reproduce`: Run what is missing of a published table and compare its scores with ours.
- `statements`: Statements of the papers that their own tables decide, and differences that the
  tables print.
- `supplementary_training`: The first stage of IDPG's supplementary training.
- `transfer`: Train on one task and score another, zero-shot or after a few examples of it.
- `what_works`: Generated minus static prompts at the same place, and five differences of methods in
  settings.
- `who_reads`: What generating a prompt is worth, by the number of frozen layers above it.
"""
