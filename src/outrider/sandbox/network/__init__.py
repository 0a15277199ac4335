"""The network of sandboxes. A sandbox reaches other machines only through a proxy, which filters and can record its
requests.

`door.py` is the entrance of one sandbox to the network, with the rules of each phase. `proxy.py` forwards the requests
of sandboxes and of image builds.
"""
