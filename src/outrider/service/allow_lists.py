"""Checks whether the operator's settings allow the Python code, runtimes, images, networks and callback hosts of a
task. Also checks the addresses to which callbacks connect.

Host paths are checked in admission.py. This module never imports the Python code that a task names.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

from outrider.config import Config
from outrider.errors import InvalidField
from outrider.evaluators.nested import nested_specs
from outrider.sandbox.network.addresses import METADATA, Address, embedded_addresses, is_own, plain
from outrider.sandbox.network.rules import NetworkRules
from outrider.sandbox.rootfs.store import begins_with
from outrider.service.principals import Principal
from outrider.spec import GroupSpec, RuntimeSpec, fields_of_step, runtimes_of, steps_of


class AllowLists:
    """Checks groups and connections against the operator's allow lists.

    A callback's host name is checked when the group is submitted. Its address is checked when the connection is opened,
    because the name may lead to another address by then.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._network = NetworkRules(config)
        places = config.callbacks.allow
        self._networks = [ip_network(place) for place in places if "/" in place]
        self._names = [place.lower() for place in places if "/" not in place]

    def check(self, spec: GroupSpec, caller: Principal) -> None:
        """Raise InvalidField if the group names anything that the settings do not allow."""
        task = spec.task
        runtimes = runtimes_of(task)
        for runtime, field in runtimes:
            self.check_python(runtime.kind, field=f"{field}.kind")
        self.check_python(task.harness.agent, field="task.harness.agent")
        for number, step in enumerate(steps_of(task)):
            with fields_of_step(number):
                for evaluator, field in nested_specs(step.evaluator):
                    self.check_python(evaluator.kind, field=f"{field}.kind")
                    self.check_python(evaluator.path, field=f"{field}.path")
        for runtime, field in runtimes:
            self.check_runtime(runtime, caller, field=field)
            tenant = None if caller.may("admin") else caller.tenant
            whose = "tasks" if tenant is None else f"tasks of tenant {tenant!r}"
            self._network.check(runtime.network, tenant=tenant, whose=whose, field=field)
        if spec.callback_url is not None:
            self.check_host(str(spec.callback_url))

    def check_runtime(self, runtime: RuntimeSpec, caller: Principal, *, field: str) -> None:
        """Raise InvalidField if the caller may not use the kind of sandbox or the image of `runtime`."""
        sandboxes, kind, image = self._config.sandboxes, runtime.sandbox_kind, runtime.image
        if not caller.may("admin") and kind not in sandboxes.runtimes:
            raise InvalidField(
                f"sandboxes of kind {kind!r} are for admins: token {caller.name!r} may use"
                f" {', '.join(sandboxes.runtimes) or 'none'}",
                field=f"{field}.kind",
                hint="the operator's setting sandboxes.runtimes lists the kinds for other tokens",
            )
        prefixes = None if image is None or image.startswith("/") else sandboxes.images
        if prefixes is not None and not any(begins_with(str(image), prefix) for prefix in prefixes):
            raise InvalidField(
                f"{image!r} is not among the images that tasks may name",
                field=f"{field}.image",
                hint="the operator's setting sandboxes.images lists the beginnings of allowed names",
            )

    def check_python(self, name: str | None, *, field: str) -> None:
        """Raise InvalidField unless plugins.allow covers this dotted path to Python code. Call this before importing
        the code."""
        if name is None or ":" not in name:
            return
        module, _, attribute = name.partition(":")
        for allowed in self._config.plugins.allow:
            # A dotted attribute could lead to another module, such as `allowed:os.system` if the module `allowed`
            # imports os.
            within = "." not in attribute and (module == allowed or module.startswith(f"{allowed}."))
            if allowed in ("*", name) or within:
                return
        raise InvalidField(
            f"{name!r} is not among the Python that may be named here: it would run inside the service",
            field=field,
            hint=f"the operator allows it with `outrider serve --allow-plugin {module}`, or the setting plugins.allow",
        )

    def check_host(self, url: str) -> None:
        """Raise InvalidField if callbacks may not use the host name or IP address in `url`."""
        host = (urlsplit(url).hostname or "").rstrip(".")
        try:
            address = plain(ip_address(host))
        except ValueError:
            listed = any(host == name or (name[:2] == "*." and host.endswith(name[1:])) for name in self._names)
            refused = bool(self._names or self._networks) and not listed
        else:
            refused = self._refused(address) or (bool(self._names or self._networks) and not self._listed(address))
        if refused:
            raise InvalidField(
                f"callbacks may not go to {host!r}",
                field="callback_url",
                hint="the operator allows hosts and networks with the setting callbacks.allow",
            )

    def socket(self, place: tuple[int, int, int, str, Sequence[Any]]) -> socket.socket:
        """Create the socket for a callback's connection. `place` is an entry of `socket.getaddrinfo`. Raises OSError if
        callbacks may not use the address in `place`."""
        family, kind, protocol, _, address = place
        if self._refused(plain(ip_address(address[0]))):
            raise OSError(f"callbacks may not go to {address[0]}: the operator's setting is callbacks.allow")
        return socket.socket(family, kind, protocol)

    def _refused(self, address: Address) -> bool:
        """Return True if an address is sensitive and callbacks.allow does not list it. Sensitive addresses are:

        - link-local and multicast addresses
        - cloud metadata services, which give credentials to any process on this machine
        - this machine's own addresses, if the service is public"""
        return any(
            (one.is_link_local or one.is_multicast or one in METADATA or (self._config.public and is_own(one)))
            and not self._listed(one)
            for one in embedded_addresses(address)
        )

    def _listed(self, address: Address) -> bool:
        return str(address) in self._names or any(address in network for network in self._networks)
