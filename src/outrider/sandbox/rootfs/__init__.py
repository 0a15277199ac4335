"""Images, which are root file systems for sandboxes: imported from archives, pulled from registries, or built from
recipes and Dockerfiles.

The code that runs sandboxes on images is in runtimes/.
"""
