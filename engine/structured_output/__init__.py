"""Grammars, their matchers and token masks; the only user of llguidance."""
