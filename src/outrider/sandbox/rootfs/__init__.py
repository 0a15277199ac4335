"""Images: root file systems for sandboxes, imported from archives, pulled from registries, or built from recipes and
Dockerfiles.

The runtimes that run sandboxes over images are in runtimes/.
"""
