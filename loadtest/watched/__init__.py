"""A running service, a real Prometheus that watches it, and every query of dashboard and rules."""
