"""What `etcl` can do: every command parses, makes one call and prints. Heavy imports live inside commands."""
