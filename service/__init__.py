"""Text and HTTP: turns what clients send into engine requests, and events into answers."""
