"""The reproduction of the papers, which the library does not import.

Modules:

- `course`: The example sentences, the short training run and the table of scores of the course.
- `exercises`: The answers to the exercises of the course, as digests and ranges, and their check.
- `analysis`: What the hidden states contain, and which layer suits a prompt.
- `efficiency`: Parameters, time and memory of a method.
- `papers`: The papers: their protocols and published scores, and the runs of their tables.
"""
