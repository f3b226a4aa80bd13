"""Text in, text out: the tokenizer, chat templates and the detokenizer."""
