"""Starts and restarts engines and API processes, and tells each of the others."""
