"""The network of sandboxes: a filtering and recording forward proxy, which is a sandbox's only way out.

`door.py` is the proxy of one sandbox, with its rules by phase. `proxy.py` carries requests, also those of image builds.
"""
