"""HTTP plumbing below the endpoints, on ASGI and uvicorn: bodies, connections, errors, JSON.

Nothing here depends on models or engines beyond `engine.errors`.
"""
