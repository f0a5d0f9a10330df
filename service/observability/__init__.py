"""Observability: Prometheus metrics, the access log and OpenTelemetry traces."""
