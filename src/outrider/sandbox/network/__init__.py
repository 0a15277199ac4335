"""The network of sandboxes. A sandbox reaches other machines only through a forward proxy, which filters its requests
and can record the replies.

`door.py` is the entrance of one sandbox to the network, with the rules of each phase. `proxy.py` forwards the requests
of sandboxes and of image builds.
"""
