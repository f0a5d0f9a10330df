"""What states cost over HTTP: `python -m loadtest.state`."""
