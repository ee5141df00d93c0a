"""How the package is built: who imports whom; and that its texts point at what is there."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "qkvcache"
FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
ORDER = ["formats", "kernels", "storage", "attention", "layers", "caches"]  # each may import those before it
ALONE = {"autocast", "files", "links", "models", "progress", "releases", "rooms"}  # import no other
FOR_ALL = {"autocast", "files", "links", "progress", "releases", "rooms"}
ABOVE = {
    "hybrid",
    "latents",
    "evict",
    "policies",
    "select",
    "batching",
    "prefix",
    "planning",
    "evaluation",
    "demo",
}  # rooms: import all of them
ABOVE |= {"options", "commands", "cli", "__init__"}


@functools.cache
def parsed(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


def part(name: str) -> str:
    return Path(name).parts[0].removesuffix(".py")


def imports(name: str) -> set[str]:
    """Absolute names of all modules imported anywhere in the file, with what is taken from them."""
    package = ["qkvcache", *Path(name).parts[:-1]]
    found = set()
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            found |= {".".join(filter(None, [*base, node.module, alias.name])) for alias in node.names}
    return found


def test_imports_go_one_way():
    for name in FILES:
        assert part(name) in {*ORDER, *ALONE, *ABOVE}, f"{name} is of a new part: say here where it stands"
        if part(name) not in ABOVE:
            allowed = ALONE if part(name) in ALONE else FOR_ALL.union(ORDER[: ORDER.index(part(name)) + 1])
            ours = {module.split(".")[1] for module in imports(name) if module.startswith("qkvcache.")}
            assert ours <= set(allowed), name


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that can be reached from themselves, each with the others on its way, by removing those that nothing is left to import."""
    left = {name: set(found) for name, found in graph.items()}
    while done := {name for name, found in left.items() if not found & left.keys()}:
        left = {name: found - done for name, found in left.items() if name not in done}
    return [[name, *sorted(found & left.keys())] for name, found in left.items()]


def test_no_module_imports_itself_by_way_of_others():
    """Imports within functions and for types alone count too. A package's `__init__` counts where something of it is taken from there."""
    modules = {".".join(("qkvcache", *Path(name).with_suffix("").parts)).removesuffix(".__init__"): name for name in FILES}
    graph = {}
    for module, name in modules.items():
        found = {taken if taken in modules else taken.rpartition(".")[0] for taken in imports(name)}
        graph[module] = (found & modules.keys()) - {module}
    assert not cycles(graph)


def test_a_cycle_is_seen():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()})
    assert not cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_formats_and_kernels_know_nothing_of_transformers():
    for name in FILES:
        if part(name) in ("formats", "kernels"):
            assert not {module for module in imports(name) if module.split(".")[0] == "transformers"}, name


def test_bad_input_is_refused_and_not_asserted():
    for name, tree in ((name, parsed(name)) for name in FILES):
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], name


TYPED = {"zeros", "ones", "empty", "full", "eye", "rand", "randn", "randint", "randperm", "linspace", "logspace", "tensor", "scalar_tensor"}
PLACED = TYPED | {"arange", "tril_indices", "triu_indices"}


def factories_of_modes(tree: ast.AST) -> list[int]:
    """Lines of calls that make a tensor of the process's default dtype or on its default device."""
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        module, _, name = ast.unparse(call.func).rpartition(".")
        wanted = ({"dtype"} if name in TYPED else set()) | ({"device"} if name in PLACED else set())
        if module == "torch" and wanted - {keyword.arg for keyword in call.keywords}:
            found.append(call.lineno)
    return found


def test_tensors_are_made_in_a_named_dtype_and_place():
    for name in FILES:
        assert not factories_of_modes(parsed(name)), name


def test_a_factory_without_a_dtype_is_seen():
    assert factories_of_modes(ast.parse("torch.zeros(2, device=x.device)\ntorch.arange(3)\ntorch.arange(3, device=at)")) == [1, 2]


def launches_unguarded(tree: ast.AST) -> list[int]:
    """Lines that launch a kernel of Triton on the current device, whichever device the tensors are on."""
    guarded: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            guards = [item.context_expr.func for item in node.items if isinstance(item.context_expr, ast.Call)]
            if any(ast.unparse(guard) == "torch.cuda.device_of" for guard in guards):
                guarded |= set(ast.walk(node))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)]
    return [call.lineno for call in calls if ast.unparse(call.func.value).endswith("_kernel") and call not in guarded]


def test_kernels_run_where_their_tensors_are():
    for name, tree in ((name, parsed(name)) for name in FILES):
        assert not launches_unguarded(tree), name


def test_an_unguarded_launch_is_seen():
    launch = "a_kernel[(1,)](x)"
    assert launches_unguarded(ast.parse(f"def f(x):\n    {launch}")) == [2]
    assert not launches_unguarded(ast.parse(f"with torch.cuda.device_of(x):\n    {launch}"))


TESTS = {str(path.relative_to(ROOT.parent)): path for path in sorted((ROOT.parent / "tests").rglob("test_*.py"))}


def test_names_of_tests_are_read_at_once():
    """Fewer than 60 characters, no codes."""
    for name, path in TESTS.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert len(node.name) < 60 and not re.match(r"test_[a-z]\d+_", node.name), f"{name}: {node.name}"


PAGES = [Path(name) for name in ("README.md", "CONTRIBUTING.md", "eval/README.md")]
PAGES += sorted(path.relative_to(ROOT.parent) for path in (ROOT.parent / "docs").rglob("*.md"))


def anchors(text: str) -> set[str]:
    """Of the headings of a markdown text, as GitHub names them."""
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("name", PAGES, ids=str)
def test_links_lead_somewhere(name):
    file = ROOT.parent / name
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^ *```.*?^ *```", "", file.read_text(), flags=re.DOTALL | re.MULTILINE)):
        path, _, anchor = link.partition("#")
        if path.startswith("https:"):
            continue
        target = file.parent / path if path else file
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
