"""dubito: how far can a pretrained vision model be trusted on each image, and why not?"""
