"""The commands that compute by themselves, and what they print."""
