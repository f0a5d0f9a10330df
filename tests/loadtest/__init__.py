"""The measuring scripts: what they compute and report, never how fast."""
