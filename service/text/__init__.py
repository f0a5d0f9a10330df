"""Text and tokens: tokenizer, detokenizer, stop strings, chat templates."""
