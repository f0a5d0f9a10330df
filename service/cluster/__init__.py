"""Replicas of a server on Ray Serve, which places, restarts and scales them."""
