"""The engine: generates token ids from token ids; knows neither text nor HTTP."""
