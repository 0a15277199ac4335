"""Decodes the images of model calls, and converts them to the pixel values that a model reads."""
