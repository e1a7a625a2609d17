"""The command `etcl`: parsing, progress, and what only a person at a terminal asks for."""
