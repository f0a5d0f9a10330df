"""Files of cached states: snapshots, named states, cached prefixes, and their folder."""
