"""From a bundle to answers. Needs torch, Pillow and safetensors; no data readers, no trainer, no config."""
