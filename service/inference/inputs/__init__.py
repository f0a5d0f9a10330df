"""Reads validated requests: from wire values to what the engine takes.

Prompts become token ids; sampling parameters, grammars and states are checked against the model and
the server's limits.
"""
