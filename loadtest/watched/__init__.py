"""A running service under a real Prometheus: every query of the dashboard and of the rules."""
