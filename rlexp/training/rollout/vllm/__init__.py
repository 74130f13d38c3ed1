"""Answers by vLLM: requests and samples are those of `native`, and so are the numbers that choose the tokens."""
