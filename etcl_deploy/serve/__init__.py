"""Start, find and stop a TorchServe of our own."""
