"""Parity checks and small random models: what a new family needs."""
