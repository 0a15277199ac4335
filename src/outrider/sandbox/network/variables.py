"""Environment variables that make the programs of a sandbox use its proxy."""

from __future__ import annotations

APT_CONFIG = "/run/outrider-apt.conf"
APT_SETTINGS = b'APT::Sandbox::User "root";\n'
"""Settings that make apt download packages as root instead of as the user `_apt`: most sandboxes have no user but
root."""
LOCAL = "localhost,127.0.0.1,::1"


def proxy_variables(endpoint: str) -> dict[str, str]:
    """Return the environment variables that make programs use the proxy at `endpoint`."""
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    others = {"no_proxy": LOCAL, "NO_PROXY": LOCAL, "NODE_USE_ENV_PROXY": "1", "APT_CONFIG": APT_CONFIG}
    return {**dict.fromkeys(names, endpoint), **others}
