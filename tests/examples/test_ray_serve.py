"""`examples/ray_serve` on two local replicas of the embedded model, and the manifest for Kubernetes."""

import json
import re
import socket
import urllib.request

import pytest
import typer

from qkvcache import demo
from qkvcache.commands import batching
from tests.batching.clients import COMPLETIONS, send
from tests.batching.requests import PATIENCE, until
from tests.batching.test_sessions import in_thread
from tests.examples.load import EXAMPLES

SESSION = {"x-session-id": "a session"}


def ask(address: str, prompt: str, **options):
    """Status and body of an answer."""
    return send(address, COMPLETIONS, {"prompt": prompt, "max_tokens": 4, "temperature": 0, **options})[:2]


def turns(address: str, folder, numbers, said: str = "") -> tuple[str, list[dict]]:
    """A conversation after some turns, and the usage of each; its pages are in the folder."""
    text, usages = demo.text(), []
    for turn in numbers:
        said += text[700 * turn : 700 * turn + 350]
        _, answer = ask(address, said)
        said += answer["choices"][0]["text"]
        usages.append(answer["usage"])
        pages = (usages[-1]["total_tokens"] - 1) // 256
        assert until(lambda pages=pages: len(list(folder.glob("*.safetensors"))) == pages)
    return said, usages


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Two replicas that share a folder; its path, and their address."""
    ray, serve = pytest.importorskip("ray"), pytest.importorskip("ray.serve")
    from examples.ray_serve.app import Arguments, app

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("sessions")
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": port})
    serve.run(app(Arguments(device="cpu", dtype="float32", cb_num_blocks=16, cb_max_batch_tokens=512, store=str(folder))))
    yield folder, f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.mark.slow
def test_a_conversation_survives_its_replicas(replicas, tmp_path):
    """Each replica is lost once; answers and cached tokens are those of one server that lives."""
    import ray
    from ray import serve

    folder, address = replicas

    def running() -> int:
        return serve.status().applications["default"].deployments["Replica"].replica_states.get("RUNNING", 0)

    def lose(name: str) -> None:
        ray.kill(ray.get_actor(name, namespace="serve"))
        assert until(lambda: running() < 2)

    with in_thread(tmp_path) as alone:
        expected = turns(alone, tmp_path, range(10))
    first, second = (actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if "#Replica#" in actor["name"])
    said, usages = turns(address, folder, range(4))
    lose(first)
    said, more = turns(address, folder, range(4, 7), said)
    lose(second)
    said, rest = turns(address, folder, range(7, 10), said)
    assert (said, usages + more + rest) == expected
    assert until(lambda: running() == 2)


@pytest.mark.slow
def test_streams_and_refusals_are_those_of_the_server(replicas):
    _, address = replicas
    status, events = ask(address, "The", stream=True)
    assert status == 200 and len(events) > 3
    status, answer = ask(address, "The", max_tokens=0)
    assert status == 400 and answer["error"]["param"] == "max_tokens"
    assert send(address, "/v1/models")[1]["data"][0]["id"] == "demo"


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_pages(replicas):
    _, address = replicas
    body = json.dumps({"prompt": "The", "max_tokens": 3000, "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{address}/v1/completions", body, SESSION), timeout=PATIENCE) as answer:
        assert answer.readline().startswith(b"data: {")

    def metrics() -> str:
        return send(address, "/metrics", **SESSION)[1]

    assert until(lambda: "\nqkvcache_running 0\n" in metrics()) and 'outcome="cancelled"} 1' in metrics()


@pytest.mark.slow
def test_a_batch_with_ray_data(tmp_path, monkeypatch):
    pytest.importorskip("ray.data")
    from examples.ray_serve import batch

    words = {"Anna": "dilzon", "Otto": "marbel", "Ida": "fentis"}
    asked = "The code word of {0} is {1}. What is the code word of {0}? The code word of {0} is"
    lines = [{"id": name, "prompt": asked.format(name, word)} for name, word in words.items()]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--pages", "8", "--replicas", "1", "--new-tokens", "5", "--together", "2"]
    batch.main([str(tmp_path / "prompts.jsonl"), str(tmp_path / "answers"), *options])
    answers = [json.loads(line) for path in (tmp_path / "answers").iterdir() for line in path.read_text().splitlines()]
    assert {answer["id"]: answer["answer"][1:7] for answer in answers} == words


def test_the_turns_of_a_conversation_have_one_name():
    pytest.importorskip("ray.serve")
    from examples.ray_serve.app import conversation

    def name(**body) -> str:
        return conversation(json.dumps(body).encode())

    system, user, more = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}
    assert name(messages=[system, user]) == name(messages=[system, user, more, user], max_tokens=3) != name(messages=[system, more, user])
    assert name(prompt=300 * "x") == name(prompt=400 * "x") != name(prompt=300 * "y")
    assert conversation(b"{") == conversation(b"[" * 100_000) == conversation(b"[]") == name(messages=[system]) == name(messages=3) == ""


def test_the_manifest_for_kubernetes():
    """The server takes its arguments and has the paths of its probes; a pod has a key, and the time to stop. The image starts the same."""
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("uvicorn")
    from qkvcache.batching.server import LAST_STEP

    manifests = {found["kind"]: found for found in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())}
    pod = manifests["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    context = typer.main.get_command(batching.app).make_context("qkvcache serve", [*container["command"][2:], *container["args"]])
    assert batching.stock_options(context.args)["port"] == container["ports"][0]["containerPort"]
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["httpGet"]["path"] for probe in probes} == {"/health"} and all(probe["timeoutSeconds"] >= 5 for probe in probes)
    (key,) = container["env"]
    assert key["name"] == "QKVCACHE_API_KEY" and key["valueFrom"]["secretKeyRef"]
    stops = int(container["lifecycle"]["preStop"]["exec"]["command"][1]) + context.params["grace_seconds"] + LAST_STEP
    assert stops < pod["spec"]["terminationGracePeriodSeconds"]
    image = (EXAMPLES / "Dockerfile").read_text()
    assert f"ENTRYPOINT {json.dumps(container['command'])}" in image
    for path in re.findall(r"^COPY (.*) \S+$", image, re.MULTILINE):
        assert all((EXAMPLES.parent / name).exists() for name in path.split())
