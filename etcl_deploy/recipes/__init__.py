"""Named experiments, one TOML file each."""
