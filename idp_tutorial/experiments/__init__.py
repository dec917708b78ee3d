"""Runs and comparisons: the package that turns methods and tasks into records, tables and verdicts.

A run trains one config and writes a record. Comparisons and searches make many runs, resume after a kill, and summarise
their records. Transfer, supplementary training, multi-task models and the scikit-learn estimators build on the same runs.
Further modules compare records with the papers: published scores, contrasts with intervals, and the verdict on each claim.
"""
