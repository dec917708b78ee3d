"""The papers: their protocols and published scores, and the runs of their tables.

Modules:

- `protocols`: Turn every cell of a published table into the config of a run, as its paper trained
  it.
- `published_scores`: The scores that the three papers print, and the command that reproduces each
  table and figure.
- `reproduce`: Run what is missing of a published table and compare its scores with ours.
"""
