"""The command `etcl`: its options, its progress bars, and the checks of `etcl doctor`."""
