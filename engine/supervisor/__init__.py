"""Starts and restarts engines and API processes, and tells API processes which engines serve."""
