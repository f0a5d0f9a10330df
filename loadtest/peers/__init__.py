"""The peers: each is a function, and is left out if its package is not installed."""
