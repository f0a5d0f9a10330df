"""The HTTP service and the command line: turns clients' requests into engine requests, and the
engine's events into answers."""
