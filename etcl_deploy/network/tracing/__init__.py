"""From a torch module to a plan."""
