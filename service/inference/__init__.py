"""A request between HTTP and the engine."""
