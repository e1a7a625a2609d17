"""From a bundle to answers. Needs torch and Pillow; no data readers, no trainer, no config."""
