"""The FastAPI application and its middleware: access control, request accounting, CORS."""
