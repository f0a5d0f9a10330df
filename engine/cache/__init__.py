"""Cached states: the prefix cache, named states and their tiers; no torch."""
