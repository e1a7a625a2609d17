"""A page that runs the tasks of a bundle in a browser."""
