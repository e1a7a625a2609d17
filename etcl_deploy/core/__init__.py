"""Steps, images, tasks and files: what every other folder builds on."""
