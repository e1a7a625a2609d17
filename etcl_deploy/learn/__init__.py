"""The method: masks over one shared backbone, learned task after task."""
