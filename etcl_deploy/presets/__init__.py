"""Named choices that hold for every data set, one TOML file each; recipes hold what is a data set's own."""
