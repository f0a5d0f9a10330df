"""SRU language models, from state dicts around the `sru` package."""
