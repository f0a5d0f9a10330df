"""Sockets, processes, start and exit."""
