"""The reproduction of the papers, which the library does not import."""
