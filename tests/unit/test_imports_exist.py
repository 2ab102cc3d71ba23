"""Examples and tools run by hand, not in tests: what they import from here must exist. Read from the sources, nothing is imported."""

import ast

import pytest

from tests.launch import ROOT

SCRIPTS = sorted(path for folder in ("examples", "tools") for path in (ROOT / folder).rglob("*.py"))


def names_of(module):
    """What `from module import ...` finds: top-level names of its file, and modules in its folder."""
    path = ROOT.joinpath(*module.split("."))
    folder, file = path, path.with_suffix(".py")
    if not file.exists():
        file = folder / "__init__.py"
    assert file.exists(), f"there is no module {module}"
    found = {child.stem for child in folder.glob("*.py")} | {child.name for child in folder.glob("*/")}
    tree = ast.parse(file.read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        else:
            found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if file.name == "__init__.py":  # names that are loaded when they are asked for
        found |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return found


def test_a_missing_name_is_noticed():
    assert "COLOURS" not in names_of("megatron_sr.study.figures")
    assert {"MODES", "main"} <= names_of("megatron_sr.study.demo")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_from_this_package_exist(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("megatron_sr", "tests"):
            missing = {alias.name for alias in node.names} - names_of(node.module)
            assert not missing, f"{script.name}, line {node.lineno}: {node.module} has no {sorted(missing)}"
