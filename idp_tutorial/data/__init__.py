"""Tasks and their data.

The package defines the tasks of the three papers and eight bundled synthetic ones, reads rows from
files and from the Hugging Face hub, checks and samples them, converts them to padded batches of
tokens, and computes the metrics.
"""
