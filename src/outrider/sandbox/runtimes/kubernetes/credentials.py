"""Finds the address of an API server, and credentials for it. Both come from the pod in which this process runs, or
from a kubeconfig.

Invariant: no program that a kubeconfig names is run, and no error message contains a secret.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outrider.environment import environment, install_command
from outrider.errors import RuntimeUnavailable

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which a pod finds its service account, unless the pod or the account opts out. The folder contains the
account's token, the certificate of the cluster's authority, and the name of the pod's namespace."""
DEFAULT_NAMESPACE = "default"
HINT = "set KUBECONFIG to a kubeconfig, or run the node in a pod with a service account"


@dataclass(frozen=True, kw_only=True)
class ClusterAccess:
    """The address of one API server, and credentials for it. `headers` returns the headers that authenticate a request.
    If the token is in a file, each call reads the file again, because Kubernetes replaces a service account's token
    about once an hour. Raises OSError if the file cannot be read."""

    url: str
    namespace: str
    tls: ssl.SSLContext | None
    headers: Callable[[], dict[str, str]] = dict


class KubeCluster(msgspec.Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    proxy_url: str | None = None


class KubeUser(msgspec.Struct, rename="kebab"):
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    token: str | None = None
    token_file: str | None = msgspec.field(name="tokenFile", default=None)
    username: str | None = None
    exec: msgspec.Raw | None = None
    auth_provider: msgspec.Raw | None = None


class KubeContext(msgspec.Struct):
    cluster: str = ""
    user: str = ""
    namespace: str | None = None


class NamedCluster(msgspec.Struct):
    name: str
    cluster: KubeCluster


class NamedUser(msgspec.Struct):
    name: str
    user: KubeUser | None = None


class NamedContext(msgspec.Struct):
    name: str
    context: KubeContext


class Kubeconfig(msgspec.Struct, rename="kebab"):
    current_context: str = ""
    clusters: list[NamedCluster] | None = None
    users: list[NamedUser] | None = None
    contexts: list[NamedContext] | None = None


def find_access() -> ClusterAccess:
    """Return the access to an API server. It comes from the file that KUBECONFIG names, or else from the service
    account of this process's pod, or else from `~/.kube/config`. The call blocks. Raises RuntimeUnavailable."""
    if named := environment("KUBECONFIG"):
        first, *more = named.split(os.pathsep)
        if more:
            raise RuntimeUnavailable(
                "KUBECONFIG names several files", hint="merge them: kubectl config view --flatten > FILE"
            )
        return read_kubeconfig(Path(first))
    if (host := environment("KUBERNETES_SERVICE_HOST")) and (SERVICE_ACCOUNT / "token").exists():
        return of_pod(host, environment("KUBERNETES_SERVICE_PORT") or "443", SERVICE_ACCOUNT)
    path = Path.home() / ".kube" / "config"
    if path.exists():
        return read_kubeconfig(path)
    raise RuntimeUnavailable("no Kubernetes cluster is named on this machine", hint=HINT)


def of_pod(host: str, port: str, folder: Path) -> ClusterAccess:
    """Return the access that a pod's service account gives. `folder` contains the account's files. Raises
    RuntimeUnavailable."""
    try:
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        namespace = (folder / "namespace").read_text().strip() or DEFAULT_NAMESPACE
    except (OSError, ssl.SSLError) as error:
        raise RuntimeUnavailable(f"the service account of this pod cannot be used: {error}", hint=HINT) from error
    named = f"[{host}]" if ":" in host else host
    return ClusterAccess(
        url=f"https://{named}:{port}", namespace=namespace, tls=tls, headers=lambda: bearer(folder / "token")
    )


def bearer(path: Path) -> dict[str, str]:
    return {"Authorization": f"Bearer {path.read_text().strip()}"}


def read_kubeconfig(path: Path) -> ClusterAccess:
    """Return the access that the current context of a kubeconfig describes. Raises RuntimeUnavailable."""
    try:
        config = msgspec.yaml.decode(path.read_bytes(), type=Kubeconfig)
    except ImportError as error:
        raise RuntimeUnavailable("PyYAML is not installed", hint=install_command("kubernetes")) from error
    except OSError as error:
        raise RuntimeUnavailable(f"the kubeconfig {path} cannot be read: {error.strerror}", hint=HINT) from error
    except msgspec.MsgspecError as error:  # PyYAML's error quotes the line, which may contain a key
        what = str(error).partition("\n")[0] if isinstance(error, msgspec.ValidationError) else "it is not YAML"
        raise RuntimeUnavailable(f"the kubeconfig {path} cannot be read: {what}", hint=HINT) from error
    contexts = {one.name: one.context for one in config.contexts or ()}
    context = contexts.get(config.current_context)
    if context is None:
        raise RuntimeUnavailable(
            f"the kubeconfig {path} has no current context", hint="kubectl config use-context NAME"
        )
    cluster = {one.name: one.cluster for one in config.clusters or ()}.get(context.cluster)
    user = {one.name: one.user for one in config.users or ()}.get(context.user) or KubeUser()
    if cluster is None or not cluster.server.startswith(("http://", "https://")):
        raise RuntimeUnavailable(f"context {config.current_context!r} of {path} names no server with a URL")
    refuse_unsupported(cluster, user, path)
    return ClusterAccess(
        url=cluster.server.rstrip("/"),
        namespace=context.namespace or DEFAULT_NAMESPACE,
        tls=tls_of(cluster, user, path) if cluster.server.startswith("https://") else None,
        headers=headers_of(user, path.parent),
    )


def refuse_unsupported(cluster: KubeCluster, user: KubeUser, path: Path) -> None:
    """Raise RuntimeUnavailable if the kubeconfig uses a field that is not supported."""
    token = "put a token into the kubeconfig: kubectl create token SERVICE-ACCOUNT --duration 24h"
    refused = {
        "exec": (user.exec is not None, f"no program of a kubeconfig is run; {token}"),
        "auth-provider": (user.auth_provider is not None, token),
        "username": (user.username is not None, token),
        "proxy-url": (cluster.proxy_url is not None, "name an address that this machine reaches directly"),
        "tls-server-name": (cluster.tls_server_name is not None, "name the server by a name of its certificate"),
    }
    for name, (given, hint) in refused.items():
        if given:
            raise RuntimeUnavailable(f"{name!r} in the kubeconfig {path} is not supported", hint=hint)


def headers_of(user: KubeUser, folder: Path) -> Callable[[], dict[str, str]]:
    if user.token_file is not None:
        file = folder / user.token_file
        return lambda: bearer(file)
    if user.token is not None:
        header = {"Authorization": f"Bearer {user.token}"}
        return lambda: header
    return dict


def tls_of(cluster: KubeCluster, user: KubeUser, path: Path) -> ssl.SSLContext:
    """Return a TLS context that checks the server's certificate, and presents the user's certificate. Raises
    RuntimeUnavailable."""
    try:
        authority = content(cluster.certificate_authority_data, cluster.certificate_authority, path.parent)
        tls = ssl.create_default_context(cadata=None if authority is None else authority.decode("ascii"))
        if cluster.insecure_skip_tls_verify:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        certificate = content(user.client_certificate_data, user.client_certificate, path.parent)
        key = content(user.client_key_data, user.client_key, path.parent)
        if certificate is not None and key is not None:
            load_pair(tls, certificate, key)
    except (OSError, ValueError, binascii.Error) as error:  # ssl.SSLError is a subclass of OSError
        raise RuntimeUnavailable(f"a certificate or key of {path} cannot be used: {type(error).__name__}") from error
    return tls


def content(data: str | None, file: str | None, folder: Path) -> bytes | None:
    """Return `data`, decoded from base64, or the content of `file`. The path of `file` is relative to the kubeconfig's
    folder. Returns None if both are None."""
    if data is not None:
        return base64.b64decode(data, validate=True)
    return None if file is None else (folder / file).read_bytes()


def load_pair(tls: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a client's certificate and key. Python's `ssl` can read them only from a file. The file exists only during
    this call, and only this user can read it."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        tls.load_cert_chain(file.name)
