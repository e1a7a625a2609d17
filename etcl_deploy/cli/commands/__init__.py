"""The commands. Each parses its options, makes one call and prints; heavy imports are inside functions."""
