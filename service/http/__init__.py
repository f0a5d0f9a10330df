"""ASGI and uvicorn plumbing that knows no model: bodies, connections, errors, JSON."""
