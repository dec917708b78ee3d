"""Command-line programs: one module per command, and the code that they share.

Each module defines one function, `idp_...`; its parameters are the options, and the library does the work.
"""
