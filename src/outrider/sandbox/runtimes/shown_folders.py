"""Folders and files of the host that every sandbox of a kind can see, whatever its task is."""

SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders beside /usr with the system's programs and libraries. On many systems, they are links into /usr."""

SHOWN = {
    "namespace": ("/usr", *(f"/{name}" for name in SYSTEM_FOLDERS)),
    "process-landlock": (
        *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/proc"),
        *("/etc/alternatives", "/etc/ld.so.cache", "/etc/pki/ca-trust", "/etc/crypto-policies"),
        # Only these entries are readable, and not their parent folders, which may contain private keys of the machine.
        *(f"/etc/{folder}/{name}" for folder in ("ssl", "pki/tls") for name in ("certs", "cert.pem", "openssl.cnf")),
        *("/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf", "/etc/localtime", "/etc/mime.types"),
        *("/etc/os-release", "/etc/protocols", "/etc/services", "/sys/devices/system/cpu"),
    ),
}
