"""Wire types: what the endpoints accept and answer, as pydantic models."""
