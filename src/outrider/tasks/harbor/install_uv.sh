#!/bin/sh
# Installs uv from the index of Python packages that PIP_INDEX_URL names, at the place where uv's own installer puts it.
# The argument is the version; without an argument, the newest is installed. Needs no Python in the image. An image
# without Python gets that of its distribution, because uv's own Pythons are on a site that is no package index.
python=python3
for loader in /run/outrider-python/lib/ld-*; do
    if [ -x "$loader" ]; then
        python="$loader --library-path /run/outrider-python/lib /run/outrider-python/bin/python3"
    fi
done
$python -I - "$@" <<'EOF' || exit 1
import hashlib
import html
import io
import os
import platform
import re
import sys
import zipfile
from pathlib import Path
from urllib.parse import urldefrag, urljoin
from urllib.request import urlopen

SECONDS = 120
# The wheel for musl is statically linked, so its programs run in every image.
WHEEL = re.compile(rf"/uv-([0-9.]+)-py3-none-[^/#]*musllinux[^/#]*_{platform.machine()}\.whl(?:#|$)")
page = os.environ["PIP_INDEX_URL"].rstrip("/") + "/uv/"
with urlopen(page, timeout=SECONDS) as reply:
    links = [urljoin(reply.url, html.unescape(link)) for link in re.findall(r'href="([^"]+)"', reply.read().decode())]
wheels = {found[1]: link for link in links if (found := WHEEL.search(link))}
newest = max(wheels, key=lambda version: tuple(map(int, version.split("."))), default=None)
version = sys.argv[1] if len(sys.argv) > 1 else newest
if version not in wheels:
    sys.exit(f"{page} has no uv {version or ''} for {platform.machine()}")
link, fragment = urldefrag(wheels[version])
with urlopen(link, timeout=SECONDS) as reply:
    data = reply.read()
method, _, digest = fragment.partition("=")
if digest and hashlib.new(method, data).hexdigest() != digest:
    sys.exit(f"{link} is not the file whose {method} the index gives")
chosen = os.environ.get("UV_INSTALL_DIR") or os.environ.get("XDG_BIN_HOME")
folder = Path(chosen) if chosen else Path.home() / ".local" / "bin"
folder.mkdir(parents=True, exist_ok=True)
with zipfile.ZipFile(io.BytesIO(data)) as wheel:
    for name in ("uv", "uvx"):
        program = folder / name
        program.write_bytes(wheel.read(f"uv-{version}.data/scripts/{name}"))
        program.chmod(0o755)
(folder / "env").write_text(f'case ":$PATH:" in *":{folder}:"*) ;; *) export PATH="{folder}:$PATH" ;; esac\n')
print(f"uv {version} is installed in {folder}")
EOF
if ! command -v python3 >/dev/null && command -v apt-get >/dev/null; then
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3; } >&2
fi
