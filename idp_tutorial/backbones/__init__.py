"""Open a backbone by name, folder or hub name, at a chosen size, or fetch its weights."""
