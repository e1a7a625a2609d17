"""One backbone seen through the masks of many tasks."""
