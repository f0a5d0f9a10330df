"""Cached states: the prefix cache, named states and their tiers; does not import torch."""
