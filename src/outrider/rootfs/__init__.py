"""Images: root file systems for sandboxes, imported from archives, pulled from registries or built from recipes.

What runs sandboxes over them is in runtimes/.
"""
