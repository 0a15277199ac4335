"""Threads that decode a type for the first time, all at once. With msgspec before 0.23, the whole process crashed.

The crash ended nodes of a busy service in their first seconds. msgspec caches information about a type, and a thread
used an entry that another thread had filled in part.
"""

from __future__ import annotations

import subprocess
import sys

ROUNDS = 150
PROGRAM = f"""
import sys, threading, types
import msgspec

sys.setswitchinterval(1e-6)
SOURCE = '''
from __future__ import annotations
import msgspec
class Leaf(msgspec.Struct):
    number: int
    text: str | None = None
class Node(msgspec.Struct):
    leaf: Leaf
    leaves: list[Leaf]
    named: dict[str, Leaf]
'''
VALUE = {{"leaf": {{"number": 1}}, "leaves": [{{"number": 2, "text": "x"}}], "named": {{"k": {{"number": 3}}}}}}
JSON = msgspec.json.encode(VALUE)
PACKED = msgspec.msgpack.encode(VALUE)
WAYS = [
    lambda kind: msgspec.json.decode(JSON, type=kind),
    lambda kind: msgspec.convert(VALUE, kind),
    lambda kind: msgspec.msgpack.Decoder(kind).decode(PACKED),
]
found = []
for number in range({ROUNDS}):
    module = types.ModuleType(f"fresh_{{number}}")
    sys.modules[module.__name__] = module
    exec(SOURCE, module.__dict__)
    gate = threading.Barrier(len(WAYS))
    def work(way):
        gate.wait()
        found.append(msgspec.to_builtins(way(module.Node))["named"]["k"]["number"])
    threads = [threading.Thread(target=work, args=(way,)) for way in WAYS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(found == [3] * len(found), len(found))
"""


def test_threads_decode_a_new_type_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["True", str(3 * ROUNDS)]), done.stderr
