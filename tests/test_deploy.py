"""deploy/: what containers, systemd, Kubernetes and proxies are told is what the server really does."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from stapes.cli.arguments import normalise
from stapes.cli.main import app
from stapes.serving import access, health
from stapes.serving.run import KEEP_ALIVE_SECONDS
from stapes.serving.settings import LimitSettings, ModelSettings, NetworkSettings, size_in_bytes

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PORT, GRACE = NetworkSettings().port, LimitSettings().shutdown_seconds
ROUTES = {route.path for route in health.router.routes}  # type: ignore[attr-defined]
OPTIONS = {
    "STAPES_" + each.name.upper() for kind in (NetworkSettings, ModelSettings, LimitSettings) for each in fields(kind)
}
IMAGES = ("cpu", "cuda", "rocm")

pytestmark = pytest.mark.skipif(not DEPLOY.is_dir(), reason="deploy/ is not part of what is installed")


def is_command(words: list[str]) -> None:
    """Raises where the command line does not know it."""
    app.parse_args(normalise(app, words), exit_on_error=False, print_error=False)


def instructions(image: str) -> list[tuple[str, str]]:
    text = (DEPLOY / f"Dockerfile.{image}").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1].strip()) for line in text.splitlines() if line]


def found(image: str, name: str) -> list[str]:
    return [rest for each, rest in instructions(image) if each == name]


def environment(image: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for line in found(image, "ENV") for pair in shlex.split(line))


@pytest.mark.parametrize("image", IMAGES)
def test_images_run_a_real_command_and_not_as_root(image: str) -> None:
    (entry,), (command,) = found(image, "ENTRYPOINT"), found(image, "CMD")
    words = [*json.loads(entry), *json.loads(command)]
    assert words[0] in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    is_command(words[1:])
    (user,) = found(image, "USER")
    assert user == "10001:10001"
    assert found(image, "EXPOSE") == [environment(image)["STAPES_PORT"]] == [str(PORT)]
    names = [each for each, _ in instructions(image)]
    assert names.index("USER") > max(place for place, name in enumerate(names) if name == "RUN")


@pytest.mark.parametrize("image", IMAGES)
def test_images_keep_what_must_last_on_volumes(image: str) -> None:
    volumes = json.loads(found(image, "VOLUME")[0])
    kept = {name: value for name, value in environment(image).items() if value.startswith("/")}
    assert {"STAPES_MODEL_DIR", "STAPES_SPOOL_DIR", "XDG_CACHE_HOME"} <= kept.keys()
    assert all(any(value.startswith(volume) for volume in volumes) for value in kept.values())
    assert {name for name in environment(image) if name.startswith("STAPES_")} <= OPTIONS


@pytest.mark.parametrize("image", IMAGES)
def test_images_are_healthy_when_inference_is(image: str) -> None:
    (check,) = found(image, "HEALTHCHECK")
    url = re.search(r"http://127.0.0.1:(\d+)(/\w+)", check)
    assert url is not None
    assert (int(url[1]), url[2]) == (PORT, "/readyz")
    assert "/readyz" in ROUTES & access._OPEN  # no key is needed


@pytest.mark.parametrize("image", IMAGES)
def test_images_take_pytorch_first_and_from_an_index_of_its_own(image: str) -> None:
    runs = found(image, "RUN")
    torch = next(place for place, run in enumerate(runs) if "--index-url" in run)
    assert torch < next(place for place, run in enumerate(runs) if "[serve]" in run)
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert f"TORCH=torch=={pinned[1]}" in found(image, "ARG")
    index = {"cpu": "/cpu", "cuda": "/cu", "rocm": "/rocm"}[image]
    assert any(each.startswith("TORCH_INDEX=https://download.pytorch.org/whl" + index) for each in found(image, "ARG"))
    for line in found(image, "COPY"):
        assert all((ROOT / source).exists() for source in line.split()[:-1])
    if image != "cpu":
        assert any("gcc" in run for run in runs)  # Triton needs it as it runs


def test_what_an_image_is_made_of_is_let_in() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in found("cpu", "COPY"):
        assert all(f"!{source.partition('/')[0]}" in ignored for source in line.split()[:-1])


def interpolated(value: Any) -> Any:
    """With the defaults of ${NAME:-default}."""
    return json.loads(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", json.dumps(value)))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return interpolated(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


@pytest.mark.parametrize("image", IMAGES)
def test_compose(compose: dict[str, Any], image: str) -> None:
    service = compose["services"][image]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    is_command(service["command"])
    address, outside, inside = service["ports"][0].split(":")
    assert (address, int(outside), int(inside)) == ("127.0.0.1", PORT, PORT)
    places = [volume.split(":") for volume in service["volumes"]]
    assert {name for name, _ in places} <= compose["volumes"].keys()
    assert {place for _, place in places} == set(json.loads(found(image, "VOLUME")[0]))
    keys = service["command"][service["command"].index("--api-key-file") + 1]
    assert keys == f"/run/secrets/{service['secrets'][0]}"
    assert set(service["secrets"]) <= compose["secrets"].keys()
    assert int(service["stop_grace_period"].removesuffix("s")) > GRACE + 5
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


def test_compose_gives_each_its_devices(compose: dict[str, Any]) -> None:
    amd = compose["services"]["rocm"]
    assert amd["devices"] == ["/dev/kfd", "/dev/dri"]
    assert all(group.isdecimal() for group in amd["group_add"])  # names mean nothing in the container
    (gpu,) = compose["services"]["cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert gpu["driver"] == "nvidia"
    assert "gpu" in gpu["capabilities"]
    assert "devices" not in compose["services"]["cpu"]


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def test_kubernetes(manifests: dict[str, Any]) -> None:
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for each in (container, *pod["initContainers"]):
        is_command(each["args"])
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
        assert {mount["name"] for mount in each["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["terminationGracePeriodSeconds"] > GRACE + 5
    (port,) = container["ports"]
    assert port["containerPort"] == PORT
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/readyz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }
    assert all(probe["port"] == port["name"] and probe["path"] in access._OPEN for probe in probes.values())
    keys = container["args"][container["args"].index("--api-key-file") + 1]
    assert any(keys.startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"])
    # One model is pulled, and the same is served.
    assert pod["initContainers"][0]["args"][-1] == container["args"][container["args"].index("--model") + 1]
    (exposed,) = manifests["Service"]["spec"]["ports"]
    assert (exposed["port"], exposed["targetPort"]) == (PORT, port["name"])
    assert manifests["Service"]["spec"]["selector"] == manifests["Deployment"]["spec"]["selector"]["matchLabels"]
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert claims == [manifests["PersistentVolumeClaim"]["metadata"]["name"]]


def unit() -> Iterator[tuple[str, str]]:
    for line in (DEPLOY / "stapes.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield name, value


def test_systemd() -> None:
    values = dict(unit())
    words = shlex.split(values["ExecStart"])
    is_command(words[1:])
    assert values["KillMode"] == "mixed"  # engines are ended by the server, once they have finished
    assert int(values["TimeoutStopSec"]) > GRACE + 5
    assert values["DynamicUser"] == "yes"
    assert {"video", "render"} <= set(values["SupplementaryGroups"].split())
    told = dict(pair.split("=", 1) for name, value in unit() if name == "Environment" for pair in shlex.split(value))
    assert {name for name in told if name.startswith("STAPES_")} <= OPTIONS
    folders = {f"/var/lib/{folder}" for folder in values["StateDirectory"].split()}
    assert {told["STAPES_MODEL_DIR"], told["STAPES_SPOOL_DIR"]} <= folders


@pytest.mark.parametrize("name", ["nginx.conf", "Caddyfile"])
def test_proxies_let_through_what_the_server_takes(name: str) -> None:
    text = (DEPLOY / name).read_text()
    size = re.search(r"(?:client_max_body_size|max_size) (\w+)", text)
    assert size is not None
    assert size_in_bytes(size[1]) >= size_in_bytes(LimitSettings().max_upload)
    assert f"127.0.0.1:{PORT}" in text
    assert all(path in text for path in ("metrics", *(each.strip("/") for each in access._OPEN)))
    if name == "nginx.conf":
        for directive in ("proxy_buffering off", "proxy_request_buffering off", "proxy_http_version 1.1"):
            assert f"{directive};" in text
        assert "proxy_set_header Upgrade $http_upgrade;" in text
        assert "proxy_set_header Host $http_host;" in text
        assert int(re.findall(r"proxy_read_timeout (\d+)s", text)[0]) >= 3600
    else:
        assert "flush_interval -1" in text
        assert int(re.findall(r"keepalive (\d+)s", text)[0]) < KEEP_ALIVE_SECONDS


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*")), ids=lambda path: path.name)
def test_there_are_no_secrets_and_the_readme_names_every_file(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"sha256:[0-9a-f]{8}|\bhf_\w{8}|\bsk-\w{8}|BEGIN \w* ?PRIVATE KEY", text)
    if path.name != "README.md":
        assert f"`{path.name}`" in (DEPLOY / "README.md").read_text()
