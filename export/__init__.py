"""From a run or a bundle to files other programs read."""
