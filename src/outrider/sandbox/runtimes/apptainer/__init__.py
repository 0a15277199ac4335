"""Sandboxes made by Apptainer from SIF images."""
