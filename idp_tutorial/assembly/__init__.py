"""Build a model from a method, a task and a backbone; controls and probes."""
