"""Cached states as files: snapshots, named states, cached prefixes, and their folder."""
