"""The engine: token ids in, token ids out; knows no text and no HTTP."""
