"""Parameter counts, cost model, memory and timing of the methods.

Counts of trained parameters by method and those printed in the papers, a cost model of a training
step, memory and time of full-scale runs, and timings of the methods, of their parts, and of `peft`
on the same weights.
"""
