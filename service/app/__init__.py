"""The FastAPI application and what wraps every request."""
