"""The cases of `loadtest.kernels`: shapes, operators and peers, limits, exact results, rows."""
