"""Checks of arguments, durable files and versions; every package may import them."""
