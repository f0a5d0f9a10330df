"""One module per group of endpoints; each has a `router`."""
