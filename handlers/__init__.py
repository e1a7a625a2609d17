"""The TorchServe side: what goes into an archive beside the bundle."""
