"""Ask a server: requests, answers, tokens, retries."""
